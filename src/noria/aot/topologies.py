"""The TPUs there are to compile for, and what a chip can do at most.

Figures are those of the vendor's pages (docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e and /tpu7x), read in November
2026. They are peaks: no program reaches them all.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from noria.errors import ConfigError

_GiB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """What JAX calls a device, at its peak: a chip, or one of the chiplets that it is made of."""

    flops: float  # bfloat16 operations per second
    int8_ops: float | None  # operations per second; None where the vendor names none
    memory: int  # bytes that the runtime leaves to programs
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second to other chips of the slice, over all links, one way


@dataclass(frozen=True, slots=True)
class Chip:
    """axes: of a grid of them. devices: in one chip."""

    name: str
    axes: int
    devices: int
    device: Device


def _chip(
    name: str,
    axes: int,
    devices: int,
    *,
    tflops: float,
    int8: float | None,
    gib: float,
    gbps: float,
    link: float,
) -> Chip:
    """Figures are of the chip, link of both directions together; devices share it evenly.

    gib: what libtpu 0.0.42 calls available when a program needs more.
    """
    share = 1 / devices
    device = Device(
        flops=tflops * 1e12 * share,
        int8_ops=None if int8 is None else int8 * 1e12 * share,
        memory=int(gib * _GiB * share),
        memory_bandwidth=gbps * 1e9 * share,
        link_bandwidth=link / 2 * 1e9 * share,
    )
    return Chip(name, axes, devices, device)


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            _chip("v5e", 2, 1, tflops=197, int8=393, gib=15.75, gbps=819, link=400),
            _chip("v5p", 3, 1, tflops=459, int8=918, gib=95.74, gbps=2765, link=1200),
            _chip("v6e", 2, 1, tflops=918, int8=1836, gib=31.25, gbps=1638, link=800),
            _chip("tpu7x", 3, 2, tflops=2307, int8=None, gib=189.5, gbps=7380, link=1200),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Topology:
    """Chips in a grid, a slice; and how many equal slices there are, which a slower network joins."""

    chip: Chip
    grid: tuple[int, ...]
    num_slices: int = 1

    @property
    def name(self) -> str:
        """Of a slice."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def title(self) -> str:
        return self.name if self.num_slices == 1 else f"{self.num_slices} slices of {self.name}"

    @property
    def num_chips(self) -> int:
        """Of a slice."""
        return math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        """Of a slice."""
        return self.num_chips * self.chip.devices


def parse_topology(text: str, num_slices: int = 1) -> Topology:
    """From "v6e:2x4". Raises ConfigError for a chip that is not known, or a grid of another number of axes."""
    if num_slices < 1:
        raise ConfigError(f"num_slices must be at least 1, not {num_slices}")
    name, _, grid = text.partition(":")
    chip = CHIPS.get(name)
    if chip is None:
        near = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f"did you mean {near[0]}?" if near else "name the chips and their grid, as in v6e:2x4"
        raise ConfigError(f"topology {text}: the chip {name} is not known; known: {', '.join(CHIPS)}; {hint}")
    sizes = tuple(int(size) for size in grid.split("x")) if re.fullmatch(r"\d{1,3}(x\d{1,3})*", grid) else ()
    if len(sizes) != chip.axes or 0 in sizes:
        example = "x".join("2241"[: chip.axes])
        raise ConfigError(f"topology {text}: a grid of {name} has {chip.axes} sizes, as in {name}:{example}")
    return Topology(chip, sizes, num_slices)
