"""What a scheduler tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from noria.cache.paged_cache import CacheStats


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int  # preempted ones included
    num_preemptions: int  # since the start
    cache: CacheStats
