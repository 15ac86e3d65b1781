"""The wheel: schedule, run, take the results, again. Token ids only; text is the business of `engine`."""

from __future__ import annotations

from collections.abc import Iterable

from noria.engine.request import Request
from noria.errors import EngineDeadError
from noria.runner.runner import ModelRunner
from noria.scheduler.scheduler import Scheduler


class EngineCore:
    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.num_steps = 0
        self._ended: str | None = None  # why no step can be run any more

    def add(self, request: Request) -> None:
        """Raises RequestError when the id is in use or the request can never fit, EngineDeadError after the end."""
        self._check_alive()
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        return self.scheduler.abort(request_ids)

    def step(self) -> list[tuple[Request, list[int]]]:
        """One step; returns the requests that got tokens, with these.

        A step that raises leaves scheduler and device in unknown states: it is the last one.
        Raises EngineDeadError after the end.
        """
        self._check_alive()
        try:
            return self._step()
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Gives the device's memory back."""
        self._ended = self._ended or "it was closed"
        self.runner.close()

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(f"the engine has ended ({self._ended}); start a new one")

    def _step(self) -> list[tuple[Request, list[int]]]:
        schedule = self.scheduler.schedule()
        if not schedule.num_scheduled_tokens:
            return []
        self.num_steps += 1
        self.runner.execute_model(schedule)
        sampled = self.runner.sample_tokens()
        return self.scheduler.update(schedule, sampled.result())
