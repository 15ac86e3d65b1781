"""A scheduler with a fake runner, for tests of single rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from fake_runner import FakeRunner

from noria.cache.layout import plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import Request
from noria.scheduler.policy import Policy
from noria.scheduler.schedule import Schedule, StepResult
from noria.scheduler.scheduler import Scheduler

BLOCK_SIZE = 4


class Loop:
    """Scheduler and fake runner, a step at a time; or begin() and end() apart, to run ahead."""

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int = 64,
        caching: bool = True,
        policy: Policy = "fcfs",
        num_scheduler_steps: int = 1,
        knows_stops: bool = True,
        rows_with_drafts: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """num_blocks: of each rank."""
        layout = plan_layout(windows)
        caches = [PagedCache(layout, num_blocks, BLOCK_SIZE, enable_prefix_caching=caching) for _ in range(num_ranks)]
        self.cache = caches[0]
        self.scheduler = Scheduler(
            caches,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            policy=policy,
            num_scheduler_steps=num_scheduler_steps,
            rows_with_drafts=rows_with_drafts,
        )
        self.runner = FakeRunner(layout, num_blocks, BLOCK_SIZE, knows_stops)
        self.in_flight: deque[tuple[Schedule, StepResult]] = deque()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int | None = 4,
        priority: int = 0,
        stops: Collection[int] = (),
        **options: Any,
    ) -> Request:
        """options: of SamplingParams."""
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, **options),
            key=0,
            stop_token_ids=frozenset(stops),
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def begin(self, **drafts: list[int]) -> Schedule:
        schedule = self.scheduler.schedule(drafts)
        if schedule.num_scheduled_tokens:
            self.in_flight.append((schedule, self.runner.step(schedule)))
        self.scheduler.check_integrity()
        return schedule

    def end(self) -> list[tuple[str, list[int]]]:
        """Reports the oldest step in flight; ids of requests and the tokens they got."""
        news = self.scheduler.update(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return [(request.request_id, token_ids) for request, token_ids in news]

    def step(self, **drafts: list[int]) -> Schedule:
        schedule = self.begin(**drafts)
        if self.in_flight:
            self.end()
        return schedule

    def finish(self) -> list[Schedule]:
        """The plain loop, until nobody is left."""
        schedules = []
        while self.scheduler.has_unfinished:
            schedules.append(self.step())
            assert schedules[-1].num_scheduled_tokens
        assert self.cache.stats.num_used == 0
        return schedules
