"""`noria bench step`: every compiled program alone, with what it must read and compute: the roofline, as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.cli import options
from noria.cli.bench.engine import (
    against_limits,
    engine_config,
    engine_options,
    limits_line,
    percent,
    start_engine,
)
from noria.cli.bench.machine import limits_measured_apart
from noria.cli.bench.printer import Printer
from noria.cli.main import UsageError

if TYPE_CHECKING:
    from noria.runner.runner import ModelRunner
    from noria.runner.work import Work

_TEXT = """Times each compiled program alone, on steps that are packed like those of warm-up: forward passes over the
chunk of one prompt that fills each token bucket, and over decoding requests of --context tokens; head and sampler of
each request bucket, greedy; and bursts of --num-scheduler-steps, when there can be any."""
_HEADINGS = ("program", "bucket", "rows", "tokens", "ms", "MB", "GFLOP", "GB/s", "of max", "GFLOP/s", "of max")
_WIDTHS = (16, 6, 5, 6, 9, 8, 8, 6, 6, 7, 6)
_SECONDS = 0.3  # spent on each program, at least
_IN_A_ROW = 8  # dispatched before the device is waited for, so that the host's part does not count


@dataclass(frozen=True)
class Case:
    """A program with inputs. run: dispatches it and returns what can be waited for."""

    program: str
    bucket: int
    rows: int
    tokens: int
    work: Work
    run: Callable[[], Any]


def main(args: Sequence[str]) -> int:
    values = options.parse(
        "bench step",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.option("context", int, 256, "tokens in the cache of each decoding request"),
            options.option("json", bool, False, "print JSON lines instead of a table"),
        ],
        engine=engine_options(),
    )
    config = engine_config(values.model, values.engine)
    if config.nnodes > 1:
        raise UsageError("noria bench step measures the programs of one host; leave --nnodes out, or use bench offline")
    _check_context(values.context, config.num_scheduler_steps, config.max_model_len)
    printer = Printer(values.json, _HEADINGS, _WIDTHS)
    with start_engine(config) as llm:
        _check_context(values.context, config.num_scheduler_steps, llm.config.max_model_len)
        machine = limits_measured_apart()
        printer.head(limits_line(machine), f"limits {machine.read_gb_s} GB/s, {machine.gflop_s} GFLOP/s")
        for case in cases(llm.engine.core.runner, values.context):
            seconds = seconds_of(case.run)
            figures = {
                "program": case.program,
                "bucket": case.bucket,
                "rows": case.rows,
                "tokens": case.tokens,
                "ms": round(1e3 * seconds, 4),
                "mb": round(case.work.bytes_read / 1e6, 3),
                "gflop": round(case.work.flops / 1e9, 4),
                **against_limits(case.work, seconds, machine),
            }
            printer.line(figures, _cells(figures))
    return 0


def _check_context(context: int, num_steps: int, max_model_len: int | None) -> None:
    if context < 1 or (max_model_len is not None and context >= max_model_len):
        raise UsageError(f"--context must be at least 1 and less than max_model_len ({max_model_len}), not {context}")
    if max_model_len is not None and context + num_steps > max_model_len:
        raise UsageError(
            f"--context ({context}) and the tokens of a burst (--num-scheduler-steps {num_steps}) exceed max_model_len "
            f"({max_model_len}); lower one of them"
        )


def cases(runner: ModelRunner, context: int) -> Iterator[Case]:
    """Every program; those of decoding requests once per request bucket and for one request alone."""
    work, config = runner.work_model(), runner.config
    ranks = config.attention_data_parallel_size  # of a copy of the model, each of which has such rows
    rows = sorted({1, *(min(size, config.max_num_seqs) for size in runner.buckets.requests)})
    for bucket in runner.buckets.tokens:
        count = min(bucket, config.max_num_batched_tokens, config.max_model_len)
        if count > 1:
            inputs = runner.made_up_step([count])
            run = lambda inputs=inputs: runner.forward(inputs)
            yield Case("forward, prompt", inputs.num_tokens, 1, count, work.forward([(0, count)] * ranks), run)
    for size in rows:
        inputs = runner.made_up_step([1] * size, num_computed=context)
        run = lambda inputs=inputs: runner.forward(inputs)
        yield Case("forward, decode", inputs.num_tokens, size, size, work.forward([(context, 1)] * size * ranks), run)
    hidden = runner.forward(runner.made_up_step([1] * rows[-1], num_computed=context))
    for size in rows:
        inputs = runner.made_up_step([1] * size, num_computed=context)
        run = lambda inputs=inputs: runner.sample(inputs, hidden)
        yield Case("sample", inputs.num_rows, size, size, work.sample(size * ranks), run)
    if (steps := config.num_scheduler_steps) > 1:
        reach = config.most_model_len is None or context + steps <= config.most_model_len  # of bursts
        for size in rows if reach else ():
            inputs = runner.made_up_step([1] * size, num_computed=context, num_steps=steps)
            run = lambda inputs=inputs: runner.decode(inputs)
            burst = work.burst([(context, steps)] * size * ranks)
            yield Case("decode burst", inputs.num_rows, size, size * steps, burst, run)


def seconds_of(run: Callable[[], Any]) -> float:
    """Of one program, best of several rounds of some in a row. The device runs them in order."""
    run().block_until_ready()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            last = run()
        last.block_until_ready()
        now = time.perf_counter()
        best = min(best, (now - begin) / _IN_A_ROW)
        if now >= end:
            return best


def _cells(figures: dict[str, Any]) -> list[object]:
    return [
        *(figures[name] for name in ("program", "bucket", "rows", "tokens")),
        f"{figures['ms']:.3f}",
        f"{figures['mb']:,.1f}",
        f"{figures['gflop']:.2f}",
        f"{figures['gb_s']:.1f}",
        percent(figures["gb_s_fraction"]),
        f"{figures['gflop_s']:.0f}",
        percent(figures["gflop_s_fraction"]),
    ]
