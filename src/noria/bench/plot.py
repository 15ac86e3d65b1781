"""Small pictures of results as SVG: panels side by side, readable on light and on dark pages.

No script, no font and no colour comes from elsewhere; series differ by their dashes as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 400, 320  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 18, 56, 52
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_STYLE = """
svg { font: 12px system-ui, sans-serif; --paper: #fff; --ink: #1f2328; --faint: #d8dee4;
  --c0: #0b63c5; --c1: #b3480b; --c2: #16703a; --c3: #7a3fb8; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --faint: #30363d;
    --c0: #6cb2ff; --c1: #ff9e5e; --c2: #5fd38d; --c3: #cda4ff; }
}
text { fill: var(--ink); } .head { font-size: 14px; font-weight: 600; } .paper { fill: var(--paper); }
.grid { stroke: var(--faint); } .axis { stroke: var(--ink); } .line { fill: none; stroke-width: 2; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); }
.dot { stroke-width: 1.5; fill: var(--paper); } .mid { text-anchor: middle; } .end { text-anchor: end; }
"""


@dataclass(frozen=True)
class Series:
    """points: (x, y) in the order in which the line goes. labels: written at the points, none or one each."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """One document. At most four series to a panel."""
    width, height = _WIDTH * max(1, len(panels)), _HEIGHT + 30
    body = "\n".join(
        f'<g transform="translate({index * _WIDTH} 30)">\n{chr(10).join(_panel(panel))}\n</g>'
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        f'<text class="head" x="16" y="24">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`, about as many as wanted."""
    if not most > 0 or math.isinf(most):
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for series in panel.series for point in series.points]
    x_ticks = ticks(max((x for x, _ in points), default=0.0))
    y_ticks = ticks(max((y for _, y in points), default=0.0))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    across = lambda x: _LEFT + (right - _LEFT) * x / x_ticks[-1]
    up = lambda y: bottom - (bottom - _TOP) * y / y_ticks[-1]
    yield f'<text x="{_LEFT}" y="18">{escape(panel.title)}</text>'
    for tick in y_ticks:
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{up(tick) + 4:.1f}">{tick:,.6g}</text>'
    for tick in x_ticks:
        yield f'<line class="axis" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text class="mid" x="{across(tick):.1f}" y="{bottom + 18}">{tick:,.6g}</text>'
    yield f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    yield f'<text class="mid" x="{(_LEFT + right) / 2}" y="{bottom + 38}">{escape(panel.x_label)}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="mid" transform="rotate(-90 14 {middle})" x="14" y="{middle}">{escape(panel.y_label)}</text>'
    place = _LEFT
    for index, series in enumerate(panel.series):
        dashes = f' stroke-dasharray="{_DASHES[index]}"' if _DASHES[index] else ""
        yield f'<path class="line s{index}"{dashes} d="M{place} 38h26"/>'
        yield f'<text x="{place + 32}" y="42">{escape(series.name)}</text>'
        place += 48 + 7 * len(series.name)
        where = [(across(x), up(y)) for x, y in series.points]
        if where:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in where)
            yield f'<path class="line s{index}"{dashes} d="M{path}"/>'
        for (x, y), label in zip(where, series.labels):
            yield f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            yield f'<text class="mid" x="{x:.1f}" y="{y - 9:.1f}">{escape(label)}</text>'
