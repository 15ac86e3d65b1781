"""The pictures of a benchmark: how latencies are spread in one run, or how they grow with throughput over several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from noria.bench.figures import milliseconds, percentile
from noria.bench.load import Run
from noria.bench.plot import Panel, Series, svg

_TITLES: Mapping[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Time between parts of a stream",
    "e2el": "Time to the end of the answer",
}
_PERCENTS = (*range(100), 99.5, 99.9, 100)


def spread(title: str, run: Run, metrics: Sequence[str]) -> str:
    """SVG: each metric by percentile."""
    panels = [
        Panel(_TITLES[metric], "percentile of requests" if metric != "itl" else "percentile", "milliseconds", [series])
        for metric in metrics
        if (values := milliseconds(run.records, metric))
        for series in [Series(metric, [(each, percentile(values, each)) for each in _PERCENTS])]
    ]
    return svg(title, panels)


def curve(title: str, runs: Sequence[Run], results: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    """SVG: the median and the 99th percentile of each metric over the throughput that was reached.

    results: of each run, as `figures` makes them with these metrics.
    """
    panels = []
    for metric in metrics:
        found = [
            (result["output_throughput"], values, run.load)
            for run, result in zip(runs, results)
            if (values := milliseconds(run.records, metric))
        ]
        labels = [
            f"{load.max_concurrency or 'all'}" if math.isinf(load.request_rate) else f"{load.request_rate:g}/s"
            for _, _, load in found
        ]
        series = [
            Series(name, [(rate, percentile(values, each)) for rate, values, _ in found], labels)
            for name, each in (("median", 50), ("p99", 99))
        ]
        panels.append(Panel(_TITLES[metric], "output tokens per second", "milliseconds", series))
    return svg(title, panels)
