"""What the peers' scripts share: workloads, clock, and the lines they print. Plain Python, for any environment."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Requests = list[tuple[list[int], int]]  # token ids of a prompt, tokens to generate
SAMPLE_TOKENS = 16


def arguments(description: str, workloads: list[str]) -> argparse.Namespace:
    """workloads: those that the engine can run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("workloads", help="JSON file that noria bench workloads printed")
    parser.add_argument("--workload", action="append", choices=workloads, help="only this one; may be repeated")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    args.workload = args.workload or workloads
    return args


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, Requests]]:
    with open(args.workloads, encoding="utf-8") as file:
        known = json.load(file)
    for name in args.workload:
        yield name, [(prompt, count) for prompt, count in known[name]]


def measure(
    engine: str,
    name: str,
    requests: Requests,
    repetitions: int,
    run: Callable[[Requests], list[list[int]]],
    reset: Callable[[], object],
) -> None:
    """run: one repetition, returns the tokens of each request. reset: empties the prefix cache, before each of them."""
    seconds: list[float] = []
    tokens: list[list[int]] = []
    for repetition in range(repetitions + 1):
        reset()
        begin = time.perf_counter()
        tokens = run(requests)
        if repetition:  # the first one warms up
            seconds.append(time.perf_counter() - begin)
    counts = [count for _, count in requests]
    if [len(ids) for ids in tokens] != counts:
        raise SystemExit(f"{engine} ended a request of {name} early")
    seconds.sort()
    median, output, given = seconds[len(seconds) // 2], sum(counts), sum(len(prompt) for prompt, _ in requests)
    line(
        engine,
        name,
        **{"in": given},
        out=output,
        median_s=round(median, 4),
        best_s=round(seconds[0], 4),
        out_tok_s=round(output / median, 1),
        total_tok_s=round((given + output) / median, 1),
        repetitions=repetitions,
        sample=tokens[0][:SAMPLE_TOKENS],
    )


def line(engine: str, workload: str, **figures: Any) -> None:
    # Not getrusage(), which counts what the parent had when it started this process.
    with open("/proc/self/status", encoding="utf-8") as file:
        peak = round(int(file.read().split("VmHWM:")[1].split()[0]) / 1024, 1)
    print(json.dumps({"engine": engine, "workload": workload, **figures, "peak_mib": peak}), flush=True)
