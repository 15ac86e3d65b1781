"""The wheel: schedule, run, take the results, again. Token ids only; text is the business of `engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from noria.engine.request import Request
from noria.errors import EngineDeadError
from noria.observe.step_clock import StepTimes
from noria.runner.runner import ModelRunner, SampledTokens
from noria.scheduler.schedule import Schedule
from noria.scheduler.scheduler import Scheduler


class EngineCore:
    def __init__(self, runner: ModelRunner, scheduler: Scheduler, async_scheduling: bool) -> None:
        """async_scheduling: plan and dispatch a step while the one before it runs."""
        self.runner = runner
        self.scheduler = scheduler
        self._turn = self._step_ahead if async_scheduling else self._step
        self._in_flight: tuple[Schedule, SampledTokens] | None = None
        self.num_steps = 0
        self.on_schedule: Callable[[Schedule], object] | None = None  # called with every step that is dispatched
        self._ended: str | None = None  # why no step can be run any more

    def add(self, request: Request) -> None:
        """Raises RequestError when the id is in use or the request can never fit, EngineDeadError after the end."""
        self._check_alive()
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        aborted = self.scheduler.abort(request_ids)
        self._rest()
        return aborted

    def step(self) -> list[tuple[Request, list[int]]]:
        """One step; returns the requests that got tokens, with these.

        With async_scheduling the tokens are those of the step before the one dispatched: at first there are none.
        A step that raises leaves scheduler and device in unknown states: it is the last one.
        Raises EngineDeadError after the end.
        """
        self._check_alive()
        self.runner.clock.begin()
        try:
            news = self._turn()
            self._rest()
            return news
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Gives the device's memory back."""
        self._ended = self._ended or "it was closed"
        self._in_flight = None
        self.runner.close()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep their blocks, which no new request will find."""
        self.scheduler.cache.reset_prefix_cache()

    @property
    def times(self) -> StepTimes:
        return self.runner.clock.times

    def _rest(self) -> None:
        """Without work the device waits for nobody."""
        if not self.scheduler.has_unfinished:
            self.runner.clock.end()

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(f"the engine has ended ({self._ended}); start a new one")

    def _step(self) -> list[tuple[Request, list[int]]]:
        """The plain loop."""
        return self._finish(self._begin())

    def _step_ahead(self) -> list[tuple[Request, list[int]]]:
        """The same with the halves swapped: the next step is dispatched before the last one's tokens are waited for."""
        before, self._in_flight = self._in_flight, self._begin()
        news = self._finish(before)
        if not self.scheduler.has_unfinished:  # what is still in flight was computed for nobody
            self._finish(self._in_flight)
            self._in_flight = None
        return news

    def _begin(self) -> tuple[Schedule, SampledTokens] | None:
        schedule = self.scheduler.schedule()
        if not schedule.num_scheduled_tokens:
            return None
        self.num_steps += 1
        if self.on_schedule is not None:
            self.on_schedule(schedule)
        self.runner.execute_model(schedule)
        return schedule, self.runner.sample_tokens()

    def _finish(self, step: tuple[Schedule, SampledTokens] | None) -> list[tuple[Request, list[int]]]:
        if step is None:
            return []
        schedule, sampled = step
        return self.scheduler.update(schedule, sampled.result())
