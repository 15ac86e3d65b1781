"""The wheel: schedule, run, take the results, again. Token ids only; text is the business of `engine`."""

from __future__ import annotations

from collections.abc import Iterable

from noria.engine.request import Request
from noria.runner.runner import ModelRunner
from noria.scheduler.scheduler import Scheduler


class EngineCore:
    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.num_steps = 0

    def add(self, request: Request) -> None:
        """Raises RequestError when the id is in use or the request can never fit."""
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        return self.scheduler.abort(request_ids)

    def step(self) -> list[tuple[Request, list[int]]]:
        """One step; returns the requests that got tokens, with these."""
        schedule = self.scheduler.schedule()
        if not schedule.num_scheduled_tokens:
            return []
        self.num_steps += 1
        self.runner.execute_model(schedule)
        sampled = self.runner.sample_tokens()
        return self.scheduler.update(schedule, sampled.result())
