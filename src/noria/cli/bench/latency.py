"""`noria bench latency`: one batch at a time, and how long its users wait."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from noria.cli import options
from noria.cli.bench.engine import engine_config, engine_options, greedy, start_engine
from noria.cli.bench.printer import Printer
from noria.cli.bench.workloads import HIGH, LOW, Workload
from noria.cli.main import UsageError

if TYPE_CHECKING:
    from noria.engine.llm import LLM

_TEXT = """Runs one batch of equal requests several times and prints how long their users wait, in milliseconds: for the
whole batch, for the first token of a request, and between the tokens of a request."""
_PERCENTILES = (50, 90, 99)
_HEADINGS = ("milliseconds", "mean", *(f"p{each}" for each in _PERCENTILES))
_WIDTHS = (20, 10, 10, 10, 10)
_NAMES = (("batch_ms", "batch"), ("ttft_ms", "first token"), ("itl_ms", "between tokens"))


@dataclass(frozen=True)
class Latencies:
    """Seconds. whole: of each batch; first: of each request; between: of each token but the first."""

    whole: list[float]
    first: list[float]
    between: list[float]


def main(args: Sequence[str]) -> int:
    values = options.parse(
        "bench latency",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.option("input_len", int, 32, "tokens of each prompt"),
            options.option("output_len", int, 128, "tokens of each answer"),
            options.option("batch_size", int, 8, "requests at a time"),
            options.option("num_iters_warmup", int, 2, "batches that are not counted"),
            options.option("num_iters", int, 10, "batches that are counted"),
            options.option("json", bool, False, "print one JSON object instead of a table"),
        ],
        engine=engine_options(),
    )
    for name in ("input_len", "output_len", "batch_size", "num_iters"):
        if getattr(values, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(values, name)}")
    if values.num_iters_warmup < 0:
        raise UsageError(f"--num-iters-warmup must be at least 0, not {values.num_iters_warmup}")
    source = random.Random(0)
    prompts = ([source.randrange(LOW, HIGH) for _ in range(values.input_len)] for _ in range(values.batch_size))
    batch = Workload("latency", tuple((prompt, values.output_len) for prompt in prompts))
    config = engine_config(values.model, values.engine)
    batch.check(config.max_model_len or batch.longest)
    with start_engine(config) as llm:
        batch.check(llm.config.max_model_len)
        found = measure(llm, batch.fold(llm.engine.vocab_size), values.num_iters_warmup, values.num_iters)
        figures = _figures(found)
        host_share = llm.stats.times.host_share
    sizes = {name: getattr(values, name) for name in ("input_len", "output_len", "batch_size", "num_iters")}
    printer = Printer(values.json, _HEADINGS, _WIDTHS)
    if values.json:
        printer.head(
            {"engine": "noria", "bench": "latency", **sizes, **figures, "host_share": round(host_share, 4)}, ""
        )
    else:
        for key, name in _NAMES:
            row = figures[key]
            printer.line(row, [name, *("-" if number is None else f"{number:,.2f}" for number in row.values())])
    return 0


def measure(llm: LLM, batch: Workload, warm_up: int, iterations: int) -> Latencies:
    for _ in range(warm_up):
        _run(llm, batch, Latencies([], [], []))
    found = Latencies([], [], [])
    for _ in range(iterations):
        _run(llm, batch, found)
    return found


def _run(llm: LLM, batch: Workload, found: Latencies) -> None:
    """Drives a front of its own, to see the moment in which each output comes."""
    from noria.engine.front import EngineFront  # imports jax

    llm.reset_prefix_cache()
    front, last = EngineFront(llm.engine), dict[str, float]()
    begin = time.perf_counter()
    for index, (prompt, count) in enumerate(batch.requests):
        front.add(str(index), prompt, greedy(count))
    while front.has_unfinished:
        outputs = front.step()
        now = time.perf_counter()
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            if (before := last.get(output.request_id)) is None:
                found.first.append(now - begin)
                count, before = count - 1, now
            found.between.extend([(now - before) / count] * count if count else ())
            last[output.request_id] = now
    found.whole.append(time.perf_counter() - begin)


def _figures(found: Latencies) -> dict[str, dict[str, Any]]:
    return {"batch_ms": _summary(found.whole), "ttft_ms": _summary(found.first), "itl_ms": _summary(found.between)}


def _summary(seconds: list[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds; None where there is nothing to measure (one token has none after it)."""
    if not seconds:
        return dict.fromkeys(("mean", *(f"p{each}" for each in _PERCENTILES)))
    values = 1e3 * np.array(seconds)
    summary = {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}
    return {name: round(value, 3) for name, value in summary.items()}
