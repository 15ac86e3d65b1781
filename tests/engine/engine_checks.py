"""What must hold after every test."""

from __future__ import annotations

from typing import Any

from noria.scheduler.scheduler import Scheduler


def scheduler_of(llm: Any) -> Scheduler:
    return llm._front.engine.core.scheduler


def check_idle(llm: Any) -> None:
    """No request is left, the pool is full again, and nothing had to compile."""
    scheduler = scheduler_of(llm)
    assert not scheduler.has_unfinished
    assert not llm._front._groups
    assert not llm._front._group_of
    scheduler.check_integrity()
    assert scheduler.stats.cache.num_used == 0
    assert llm.stats.compiles_after_warmup == 0
