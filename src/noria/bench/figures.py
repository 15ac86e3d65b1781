"""From records to figures. The definitions and the names in JSON are those of `vllm bench serve`.

ttft: time to the first token. tpot: time per token after the first, one value per request. itl: between the parts of a
stream, one value per pair. e2el: from sending to the last part. All in milliseconds; failed requests count in none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from noria.bench.load import Run
from noria.bench.records import Record

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # what a single request can fulfil


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation between the two nearest (NumPy's default)."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def milliseconds(records: Sequence[Record], metric: str) -> list[float]:
    """All values of one metric, sorted. metric: one of METRICS."""
    good = [record for record in records if not record.error]
    if metric == "itl":
        seconds = [value for record in good for value in record.itl]
    else:
        seconds = [value for record in good if (value := getattr(record, metric)) is not None]
    return sorted(1e3 * value for value in seconds)


def is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request succeeded and kept every goal. goals: most milliseconds by metric. An answer of one token has
    no time per token, so it keeps that goal."""
    return not record.error and all(1e3 * (getattr(record, name) or 0.0) <= most for name, most in goals.items())


def figures(
    run: Run,
    percentiles: Sequence[float] = (90, 99),
    metrics: Sequence[str] = METRICS,
    goals: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Throughput over the whole run, latencies, and errors by kind. None where there is nothing to measure."""
    good = [record for record in run.records if not record.error]
    given, output = sum(record.prompt_tokens for record in good), sum(record.output_tokens for record in good)
    rate = lambda amount: round(amount / run.duration_s, 4) if run.duration_s else None
    found: dict[str, Any] = {
        "duration": round(run.duration_s, 4),
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "errors": dict(Counter(record.error for record in run.records if record.error).most_common()),
        "total_input_tokens": given,
        "total_output_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "request_throughput": rate(len(good)),
        "output_throughput": rate(output),
        "total_token_throughput": rate(given + output),
    }
    if goals:
        found["request_goodput"] = rate(sum(is_good(record, goals) for record in run.records))
        found["goodput_share"] = round(sum(is_good(record, goals) for record in run.records) / len(run.records), 4)
    for metric in metrics:
        found |= _summary(metric, milliseconds(run.records, metric), percentiles)
    return found | {"client_cpu_share": round(run.cpu_share, 4), "client_late_ms": round(1e3 * run.late_s, 3)}


def _summary(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", *(f"p{each:g}_{metric}_ms" for each in percentiles)]
    if not values:
        return dict.fromkeys(names)
    numbers = [math.fsum(values) / len(values), *(percentile(values, each) for each in (50, *percentiles))]
    return {name: round(number, 4) for name, number in zip(names, numbers)}


def details(run: Run) -> dict[str, list[Any]]:
    """Of every request, in the order of sending; times in seconds from the first one."""
    begin = min((record.start for record in run.records), default=0.0)
    return {
        "start_times": [round(record.start - begin, 6) for record in run.records],
        "ttfts": [None if record.error else round(record.ttft, 6) for record in run.records],
        "e2els": [None if record.error else round(record.e2el, 6) for record in run.records],
        "itls": [[round(value, 6) for value in record.itl] for record in run.records],
        "input_lens": [record.prompt_tokens for record in run.records],
        "output_lens": [record.output_tokens for record in run.records],
        "error_details": [f"{record.error}: {record.detail}" if record.error else "" for record in run.records],
    }
