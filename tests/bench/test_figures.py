"""The figures of a run, from made-up times; the definitions are vLLM's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from noria.bench.figures import details, figures, is_good, milliseconds, percentile
from noria.bench.load import Load, Run
from noria.bench.records import Record


def record(start: float, *news: float, tokens: int, error: str = "") -> Record:
    return Record(start, list(news), news[-1] if news else start, 10, tokens, 4, error=error)


def run_of(*records: Record, seconds: float = 10.0) -> Run:
    return Run(Load(), list(records), seconds, cpu_s=1.0, late_s=0.002)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_percentiles_are_those_of_numpy(count: int, percent: float) -> None:
    values = sorted(np.random.default_rng(count).random(count).tolist())
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_the_times_of_one_request() -> None:
    one = record(100.0, 100.2, 100.25, 100.35, 100.6, tokens=5)
    assert one.ttft == pytest.approx(0.2)
    assert one.e2el == pytest.approx(0.6)
    assert one.tpot == pytest.approx(0.4 / 4)  # five tokens in four parts: by tokens, not by parts
    assert one.itl == pytest.approx([0.05, 0.1, 0.25])
    alone = record(1.0, 1.5, tokens=1)
    assert alone.tpot is None
    assert alone.itl == []
    silent = Record(1.0, [], 3.0, 10, 1)
    assert silent.ttft == silent.e2el == 2.0
    late_end = Record(1.0, [1.5, 2.0], 2.5, 10, 3)  # a last part without text
    assert late_end.e2el == 1.5
    assert late_end.tpot == pytest.approx(0.5)


def test_a_run() -> None:
    found = figures(
        run_of(
            record(0.0, 0.1, 0.2, 0.3, tokens=3),
            record(0.0, 0.3, 0.7, tokens=2),
            record(1.0, 1.5, tokens=1),
            record(0.0, 9.0, tokens=9, error="cut"),
            record(0.0, tokens=0, error="HTTP 500"),
            record(0.0, tokens=0, error="HTTP 500"),
        ),
        percentiles=(90, 99.9),
    )
    assert (found["completed"], found["failed"]) == (3, 3)
    assert found["errors"] == {"HTTP 500": 2, "cut": 1}
    assert (found["total_input_tokens"], found["total_output_tokens"], found["cached_tokens"]) == (30, 6, 12)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.3, 0.6, 3.6)
    assert found["mean_ttft_ms"] == 300
    assert found["median_ttft_ms"] == 300
    assert found["p90_ttft_ms"] == pytest.approx(460)
    assert found["p99.9_ttft_ms"] == pytest.approx(499.6)
    assert found["mean_tpot_ms"] == pytest.approx((100 + 400) / 2)  # the answer of one token has none
    assert found["mean_itl_ms"] == pytest.approx((100 + 100 + 400) / 3)  # every pair counts, not every request
    assert found["mean_e2el_ms"] == pytest.approx((300 + 700 + 500) / 3)
    assert found["client_cpu_share"] == 0.1
    assert found["client_late_ms"] == 2
    assert "request_goodput" not in found


def test_goodput() -> None:
    fast, slow_start, slow, alone = (
        record(0.0, 0.1, 0.15, tokens=2),
        record(0.0, 0.3, 0.35, tokens=2),
        record(0.0, 0.1, 0.4, tokens=2),
        record(0.0, 0.2, tokens=1),
    )
    failed = record(0.0, 0.1, 0.15, tokens=2, error="cut")
    goals = {"ttft": 200.0, "tpot": 50.0}
    good = [is_good(each, goals) for each in (fast, slow_start, slow, alone, failed)]
    assert good == [True, False, False, True, False]
    found = figures(run_of(fast, slow_start, slow, alone, failed), goals=goals)
    assert found["request_goodput"] == 0.2
    assert found["goodput_share"] == 0.4
    assert is_good(slow, {"e2el": 400.0})
    assert not is_good(slow, {"e2el": 399.0})


def test_a_run_without_success_has_no_latencies() -> None:
    found = figures(run_of(record(0.0, tokens=0, error="connect")), metrics=("ttft", "itl"))
    assert found["mean_ttft_ms"] is None
    assert found["p99_itl_ms"] is None
    assert "mean_tpot_ms" not in found
    json.dumps(found, allow_nan=False)


def test_details_of_every_request() -> None:
    run = run_of(record(5.0, 5.1, 5.3, tokens=2), record(5.5, tokens=0, error="HTTP 429"))
    found = details(run)
    assert found["start_times"] == [0.0, 0.5]
    assert found["ttfts"] == [pytest.approx(0.1), None]
    assert found["itls"] == [[pytest.approx(0.2)], []]
    assert found["error_details"] == ["", "HTTP 429: "]
    assert milliseconds(run.records, "ttft") == [pytest.approx(100)]
