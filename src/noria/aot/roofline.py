"""How fast a program can be at best: whichever of arithmetic and memory is slower, and the exchange besides.

The roofline of Williams, Waterman & Patterson (2009). What devices exchange is added and not overlapped: the next
matrix product needs the sum of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noria.aot.hlo import Exchange
from noria.aot.topologies import Device
from noria.runner.work import Work


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds."""

    compute: float
    memory: float
    exchange: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory) + self.exchange

    @property
    def bound(self) -> str:
        return "compute" if self.compute > self.memory else "memory"


def roofline(device: Device, work: Work, exchanged: float = 0.0) -> Roofline:
    """work: of one device. exchanged: bytes that leave it."""
    return Roofline(
        work.flops / device.flops, work.bytes_read / device.memory_bandwidth, exchanged / device.link_bandwidth
    )


def bytes_sent(exchanges: Iterable[Exchange], num_devices: int) -> float:
    """Bytes that leave each device, when rings are used: an all-reduce sends everything twice, but for the device's own
    part, a gather or scatter once. num_devices: that take part where an exchange does not say how many do."""
    total = 0.0
    for each in exchanges:
        devices = each.devices or num_devices
        share = (devices - 1) / devices
        if each.kind == "all-reduce":
            total += 2 * share * each.bytes * each.times
        elif each.kind == "reduce-scatter":  # its result is a part of what is sent
            total += (devices - 1) * each.bytes * each.times
        elif each.kind == "collective-permute":
            total += each.bytes * each.times
        else:
            total += share * each.bytes * each.times
    return total
