"""How long the device waits for the host: measured on every step, for a few microseconds.

A program that was dispatched runs by itself, and the host cannot see the moment in which it ends: it can only ask, or
wait for it. So the clock asks whenever the engine passes by, and counts as the host's the time from the last moment at
which the device was known to be busy until the next program was handed over. That is an upper bound: a device that
became idle just after it was asked is counted as idle since then. When the device is still busy after a dispatch
returned, nothing is counted: it never had to wait. That is the usual case with run-ahead.

JAX's CPU client runs programs in a thread of its own (jax_cpu_enable_async_dispatch), except trivial ones, which run
inside the call that dispatches them. When a program has ended as soon as its dispatch returns, the time of the call is
therefore counted as the device's and not as the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Output = Any  # what a program yields: a jax.Array, whose is_ready() says whether the program has ended


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Sums since the start, in seconds. wall_s: while there was work to do; gap_s: of that, the device was idle."""

    wall_s: float = 0.0
    gap_s: float = 0.0

    @property
    def host_share(self) -> float:
        """The share of the time in which the device waited for the host, 0 to 1."""
        return self.gap_s / self.wall_s if self.wall_s > 0 else 0.0

    def since(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(self.wall_s - earlier.wall_s, self.gap_s - earlier.gap_s)


class StepClock:
    """Call begin() before a step and end() when there is no work left; the others around dispatches and waits."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._wall_s = 0.0
        self._gap_s = 0.0
        self._began: float | None = None  # None while there is no work
        self._busy_until = 0.0  # the last moment at which the device was known to be busy, or work came
        self._last: Output | None = None  # of the program dispatched last
        self._before = 0.0  # when that dispatch began
        self._was_busy = False  # when the wait began

    @property
    def times(self) -> StepTimes:
        running = 0.0 if self._began is None else self._now() - self._began
        return StepTimes(self._wall_s + running, self._gap_s)

    def begin(self) -> None:
        """There is work. The device waits from here on, unless it is busy already."""
        if self._began is None:
            self._began = self._busy_until = self._now()

    def end(self) -> None:
        """There is no work any more, so nobody waits."""
        if self._began is not None:
            self._wall_s += self._now() - self._began
            self._began = self._last = None

    def dispatching(self) -> None:
        """Right before a program is dispatched."""
        self._before = self._now()
        if self._is_busy():
            self._busy_until = self._before

    def dispatched(self, output: Output) -> None:
        """Right after."""
        after = self._now()
        if not self._is_busy():
            end = self._before if output.is_ready() else after
            self._gap_s += max(0.0, end - self._busy_until)
        self._last, self._busy_until = output, after

    def waiting(self) -> None:
        """Right before the host waits for an output."""
        if busy := self._is_busy():
            self._busy_until = self._now()
        self._was_busy = busy

    def waited(self, output: Output) -> None:
        """Right after. A wait that the program dispatched last has ended tells when the device became idle."""
        if (self._was_busy and output is self._last) or self._is_busy():
            self._busy_until = self._now()

    def _is_busy(self) -> bool:
        return self._last is not None and not self._last.is_ready()
