"""`noria bench offline`: throughput on the six workloads, and how near the machine's limits that is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.cli import options
from noria.cli.bench.engine import (
    against_limits,
    engine_config,
    engine_options,
    greedy,
    limits_line,
    peak_mib,
    percent,
    start_engine,
    startup_figures,
)
from noria.cli.bench.machine import Limits, limits_measured_apart
from noria.cli.bench.printer import Printer
from noria.cli.bench.workloads import Workload, choice, chosen
from noria.cli.main import UsageError
from noria.errors import NoriaError

if TYPE_CHECKING:
    from noria.engine.llm import LLM
    from noria.observe.step_clock import StepTimes
    from noria.scheduler.schedule import Schedule

_TEXT = """Runs the workloads (greedy, nothing stops early, the prefix cache empty at the start of each repetition).

The first repetition warms up and is not counted; figures are those of the median one. docs/benchmarks.md says what the
columns mean."""
_HEADINGS = ("workload", "in", "out", "median s", "best s", "out tok/s", "tok/s", "steps")
_HEADINGS_OF_LIMITS = ("GB/s", "of max", "GFLOP/s", "of max", "host", "peak MiB")
_WIDTHS = (9, 6, 6, 9, 9, 9, 9, 6, 6, 6, 7, 6, 5, 8)
_SAMPLE_TOKENS = 16  # of the first request, to compare engines


@dataclass(frozen=True)
class Run:
    """One repetition."""

    seconds: float
    schedules: list[Schedule]
    times: StepTimes
    cached_tokens: int
    sample: list[int]


def main(args: Sequence[str]) -> int:
    begin = time.perf_counter()
    values = options.parse(
        "bench offline",
        _TEXT,
        args,
        [
            options.model_argument(),
            choice(),
            options.option("repetitions", int, 3, "of each workload, without the first one, which is not counted"),
            options.option("json", bool, False, "print JSON lines instead of a table"),
        ],
        engine=engine_options(),
    )
    if values.repetitions < 1:
        raise UsageError(f"--repetitions must be at least 1, not {values.repetitions}")
    workloads = chosen(values.workload)
    config = engine_config(values.model, values.engine)
    for workload in workloads:
        workload.check(config.max_model_len or workload.longest)
    printer = Printer(values.json, (*_HEADINGS, *_HEADINGS_OF_LIMITS), _WIDTHS)
    with start_engine(config) as llm:
        vocab_size = llm.engine.vocab_size
        figures = startup_figures(llm, workloads[0].fold(vocab_size).requests[0][0][:8], begin)
        printer.head(
            {"engine": "noria", **figures},
            f"{llm.stats.startup}\nfirst token {figures['time_to_first_token_s']:.1f} s after the command began",
        )
        # Only now: measuring takes seconds, which are no part of the engine's start.
        machine = limits_measured_apart()
        printer.head(
            {"engine": "noria", **limits_line(machine)}, f"limits {machine.read_gb_s} GB/s, {machine.gflop_s} GFLOP/s"
        )
        for workload in workloads:
            result = measure(llm, workload.fold(vocab_size), values.repetitions, machine)
            printer.line({"engine": "noria", **result}, _cells(result))
        compiles = llm.stats.compiles_after_warmup
    if compiles:
        raise NoriaError(
            f"{compiles} programs were compiled after warm-up, so the figures are not those of a served model"
        )
    return 0


def measure(llm: LLM, workload: Workload, repetitions: int, machine: Limits) -> dict[str, Any]:
    """The figures of one workload. Raises ConfigError when it does not fit, NoriaError when a request failed."""
    workload.check(llm.config.max_model_len)
    _repetition(llm, workload)
    runs = sorted((_repetition(llm, workload) for _ in range(repetitions)), key=lambda run: run.seconds)
    median = runs[len(runs) // 2]
    work = llm.engine.core.runner.work_model().total(median.schedules)
    output, both = workload.output_tokens, workload.input_tokens + workload.output_tokens
    return {
        "workload": workload.name,
        "in": workload.input_tokens,
        "out": output,
        "median_s": round(median.seconds, 4),
        "best_s": round(runs[0].seconds, 4),
        "out_tok_s": round(output / median.seconds, 1),
        "total_tok_s": round(both / median.seconds, 1),
        "steps": len(median.schedules),
        **against_limits(work, median.seconds, machine),
        "host_share": round(median.times.host_share, 4),
        "cached_tokens": median.cached_tokens,
        "peak_mib": peak_mib(),
        "repetitions": repetitions,
        "sample": median.sample,
    }


def _repetition(llm: LLM, workload: Workload) -> Run:
    llm.reset_prefix_cache()
    core, schedules = llm.engine.core, list["Schedule"]()
    before = core.times
    core.on_schedule = schedules.append
    begin = time.perf_counter()
    try:
        results = llm.generate([ids for ids, _ in workload.requests], [greedy(count) for _, count in workload.requests])
    finally:
        core.on_schedule = None
    seconds = time.perf_counter() - begin
    for result, (_, count) in zip(results, workload.requests):
        if len(result.outputs[0].token_ids) != count:
            raise NoriaError(
                f"a request of {workload.name} ended early ({result.outputs[0].finish_reason}); see the log"
            )
    cached = sum(result.num_cached_tokens for result in results)
    return Run(seconds, schedules, core.times.since(before), cached, results[0].outputs[0].token_ids[:_SAMPLE_TOKENS])


def _cells(result: dict[str, Any]) -> list[object]:
    rates = [f"{result[name]:,.1f}" for name in ("out_tok_s", "total_tok_s")]
    return [
        *(result[name] for name in ("workload", "in", "out")),
        *(f"{result[name]:.3f}" for name in ("median_s", "best_s")),
        *rates,
        result["steps"],
        f"{result['gb_s']:.1f}",
        percent(result["gb_s_fraction"]),
        f"{result['gflop_s']:.0f}",
        percent(result["gflop_s_fraction"]),
        f"{100 * result['host_share']:.1f}%",
        f"{result['peak_mib']:,.0f}",
    ]
