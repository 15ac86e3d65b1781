"""What a compiled program says about itself: how often its loops turn, and what devices exchange."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS: Mapping[str, int] = MappingProxyType(
    {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32}
    | {"f64": 64, "s64": 64, "u64": 64, "s4": 4, "u4": 4}
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_COPY = re.compile(
    r"^\s+(?:ROOT )?(?:%?[\w.\-]+ = (.*?) (?:copy|copy-start|transpose)\("
    r"|%?(?:copy|transpose)[\w.\-]* = (.*?) fusion\()"
)
# Groups by their members, as in [2,4]<=[8] (two of four devices), or along axes: mesh['a'=2,'b'=4] {'b'}, or a part of
# one, {'b':(1)2}.
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=|mesh\[([^\]]*)\]\s*\{([^}]*)\})")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_ALONG = re.compile(r"'([^']*)'(?::\(\d+\)(\d+))?")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective. bytes: of its result on one device. times: how often it runs in the program. devices: that take
    part together; None where the text does not say it."""

    kind: str
    bytes: int
    times: int
    devices: int | None = None


def exchanges(text: str) -> list[Exchange]:
    """The collectives of a compiled program's text, with the loops around them counted.

    A loop whose number of turns is not written there counts as one turn.
    """
    bodies, entry = _computations(text)
    return list(_walk(bodies, entry, 1, frozenset())) if entry else []


def largest_copy(text: str) -> int:
    """Bytes of the largest array that a compiled program copies or transposes, alone or in a fusion of the name.

    Copies to the chip's fast memory, S(1), are how a TPU prefetches and do not count.
    """
    shapes = (found[1] or found[2] for line in text.splitlines() if (found := _COPY.match(line)))
    sizes = (_num_bytes(shape, is_started=True) for shape in shapes if "S(1)" not in shape)
    return max(sizes, default=0)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    bodies: dict[str, list[str]] = {}
    current, entry = "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = found[1]
            bodies[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current:
            bodies[current].append(line)
    return bodies, entry


def _walk(bodies: Mapping[str, list[str]], name: str, times: int, seen: frozenset[str]) -> Iterator[Exchange]:
    if name in seen:
        return
    for line in bodies.get(name, ()):
        if not (found := _INSTRUCTION.match(line)):
            continue
        kind = found[2].removesuffix("-start")
        if kind in COLLECTIVES:
            yield Exchange(kind, _num_bytes(found[1], is_started=found[2] != kind), times, _group(line))
            continue
        turns = _turns(bodies, line) if kind == "while" else 1
        for called in _CALLED.findall(line):
            for each in called.replace("%", "").split(", "):
                yield from _walk(bodies, each, times * turns, seen | {name})


def _group(collective: str) -> int | None:
    if not (found := _GROUPS.search(collective)):
        return None
    members, size, axes, along = found.groups()
    if axes is None:
        return int(size) if size else members.count(",") + 1
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    return math.prod(int(part) if part else sizes[name] for name, part in _ALONG.findall(along))


def _turns(bodies: Mapping[str, list[str]], loop: str) -> int:
    """Written at the loop, or the constant that the counter is compared with."""
    if known := _TRIPS.search(loop):
        return int(known[1])
    found = re.search(r"condition=%?([\w.\-]+)", loop)
    condition = "\n".join(bodies.get(found[1], ())) if found else ""
    limits = re.findall(r"= s32\[\]\S* constant\((\d+)\)", condition)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in condition else 1


def _num_bytes(shapes: str, *, is_started: bool) -> int:
    """is_started: the shape is a pair of operand and result, or more; the result is the largest of them."""
    sizes = [
        math.prod(int(size) for size in dims.split(",") if size) * _BITS[kind] // 8
        for kind, dims in _SHAPE.findall(shapes)
        if kind in _BITS
    ]
    return (max(sizes, default=0)) if is_started else sum(sizes)
