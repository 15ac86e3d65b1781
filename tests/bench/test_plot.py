"""Pictures: well-formed, whole in themselves, labelled, and with the points where the values are."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from noria.bench.figures import METRICS, figures
from noria.bench.load import Load, Run
from noria.bench.pictures import curve, spread
from noria.bench.plot import Panel, Series, svg, ticks
from noria.bench.records import Record

NAMESPACE = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(document).iter(f"{NAMESPACE}text")]


@pytest.mark.parametrize("most", [0.003, 0.7, 1, 9.99, 10, 123, 98765.4])
def test_ticks_are_round_and_reach_the_largest_value(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert most <= found[-1] * (1 + 1e-9)
    assert found[-2] < most
    assert 3 <= len(found) <= 12
    step = found[1] / 10.0 ** math.floor(math.log10(found[1]) + 1e-9)
    assert any(step == pytest.approx(each) for each in (1, 2, 2.5, 5))


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan"), float("inf")])
def test_ticks_of_nothing(most: float) -> None:
    assert ticks(most) == [0.0, 1.0]


def test_points_are_where_their_values_are() -> None:
    document = svg("x", [Panel("p", "across", "up", [Series("s", [(0, 0), (5, 10), (10, 20)], ["a", "b", "c"])])])
    circles = list(ElementTree.fromstring(document).iter(f"{NAMESPACE}circle"))
    xs, ys = ([float(circle.attrib[name]) for circle in circles] for name in ("cx", "cy"))
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.11)  # y grows downwards in SVG
    assert ys[0] > ys[1] > ys[2]
    assert {"a", "b", "c", "across", "up", "s"} <= set(texts(document))


def test_a_document_is_whole_in_itself_and_for_light_and_dark() -> None:
    document = svg('<"& title', [Panel("a < b", "x & y", "z", [Series("s", [(1, 2)])]), Panel("b", "", "", [])])
    root = ElementTree.fromstring(document)
    assert root.attrib["viewBox"] == "0 0 800 350"
    assert '<"& title' in texts(document)
    assert "prefers-color-scheme: dark" in document
    assert not re.search(r"href|url\(|<script|@import", document)
    assert document.count("http") == 1  # the namespace
    assert "nan" not in document
    assert ElementTree.fromstring(svg("nothing", [])) is not None


def a_run(load: Load, factor: float) -> Run:
    records = [
        Record(0.0, [factor * n, factor * (n + 1)], factor * (n + 1), prompt_tokens=5, output_tokens=2)
        for n in range(1, 20)
    ]
    return Run(load, records, 10 * factor, 1.0, 0.0)


def test_latencies_of_one_run() -> None:
    document = spread("m at u", a_run(Load(), 0.1), METRICS)
    assert "Time to first token" in texts(document)
    assert texts(document).count("milliseconds") == 4
    failed = Run(Load(), [Record(0.0, error="cut")], 1.0, 0.0, 0.0)
    assert texts(spread("m", failed, METRICS)) == ["m"]


def test_a_curve_of_several_runs() -> None:
    runs = [a_run(Load(max_concurrency=n), 0.1 * n) for n in (1, 8)] + [a_run(Load(request_rate=2.5), 0.3)]
    document = curve("m", runs, [figures(run) for run in runs], ("ttft", "e2el"))
    shown = texts(document)
    assert shown.count("8") == 4  # at the median and the 99th percentile of two metrics
    assert shown.count("2.5/s") == 4
    assert shown.count("output tokens per second") == 2
    assert {"median", "p99"} <= set(shown)
