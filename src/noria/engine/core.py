"""The wheel: schedule, run, take the results, again. Token ids only; text is the business of `engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from noria.engine.request import Request
from noria.engine.speculation import Speculation
from noria.engine.structured import StructuredRequests
from noria.errors import EngineDeadError, RequestError
from noria.observe.step_clock import StepTimes
from noria.runner.runner import ModelRunner, SampledTokens
from noria.scheduler.schedule import Schedule
from noria.scheduler.scheduler import Scheduler

_COMPILE_WAIT_S = 0.02  # of a step that has nothing to do until a grammar is compiled
News = list[tuple[Request, list[int]]]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step of which the forward pass is dispatched, and the sampler is not."""

    schedule: Schedule
    structured: list[Request]  # that sample under a grammar


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        structured: StructuredRequests,
        speculation: Speculation,
        async_scheduling: bool,
    ) -> None:
        """async_scheduling: plan and dispatch a step while the one before it runs."""
        self.runner = runner
        self.scheduler = scheduler
        self.structured = structured
        self.speculation = speculation
        self._turn = self._step_ahead if async_scheduling else self._step
        self._in_flight: tuple[Schedule, SampledTokens] | None = None
        self.num_steps = 0
        self.on_schedule: Callable[[Schedule], object] | None = None  # called with every step that is dispatched
        self._ended: str | None = None  # why no step can be run any more

    def add(self, request: Request) -> None:
        """Raises RequestError when the id is in use or the request can never fit, EngineDeadError after the end."""
        self._check_alive()
        is_ready = self.structured.add(request)
        try:
            self.scheduler.add(request, hold=not is_ready)
        except RequestError:
            self.structured.forget([request])
            raise

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        aborted = self._abort(request_ids)
        self._rest()
        return aborted

    def step(self) -> News:
        """One step; returns the requests that got tokens, with these, and those whose grammar failed, with none.

        With async_scheduling the tokens are those of the step before the one dispatched: at first there are none.
        A step that raises leaves scheduler and device in unknown states: it is the last one.
        Raises EngineDeadError after the end.
        """
        self._check_alive()
        try:
            failed = self._settle()
            self.runner.clock.begin()
            news = self._turn()
            self._rest()
            return [*((request, []) for request in failed), *news]
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Gives the device's memory back."""
        self._ended = self._ended or "it was closed"
        self._in_flight = None
        self.structured.compiler.close()
        self.speculation.close()
        self.runner.close()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep their blocks, which no new request will find."""
        self.scheduler.reset_prefix_cache()
        self.speculation.reset_prefix_cache()

    @property
    def times(self) -> StepTimes:
        return self.runner.clock.times

    def _rest(self) -> None:
        """Without work the device waits for nobody."""
        if not self.scheduler.can_advance:
            self.runner.clock.end()

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(f"the engine has ended ({self._ended}); start a new one")

    def _settle(self) -> list[Request]:
        """Queues those whose grammar is ready; returns those that are finished because it failed."""
        if not self.structured.num_compiling:
            return []
        if not self.scheduler.can_advance:
            self.structured.wait(_COMPILE_WAIT_S)
        ready, failed = self.structured.settle()
        for request in ready:
            self.scheduler.release(request)
        self._abort(request.request_id for request in failed)
        return failed

    def _abort(self, request_ids: Iterable[str]) -> list[Request]:
        aborted = self.scheduler.abort(request_ids)
        self.structured.forget(aborted)
        self.speculation.forget(aborted)
        return aborted

    def _step(self) -> News:
        """The plain loop."""
        begun = self._execute()
        if begun is None:
            return []
        step, ended = self._sample(begun)
        return _joined(self._finish(step), ended)

    def _step_ahead(self) -> News:
        """The same with the halves swapped: the next step is dispatched before the last one's tokens are waited for.

        Where a grammar says what may come next, that is known only with the last token: then the two halves of the next
        step are apart, and its forward pass runs while the host takes the tokens and fills the masks. Where drafts are
        likely, they are worth more than what the host and the device gain by working at the same time: then the tokens
        come first. So they do after a step with drafts, of which only its tokens tell how far anybody got.
        """
        before, self._in_flight = self._in_flight, None
        news: News = []
        ended: list[Request] = []
        if before is not None and (before[0].draft_token_ids or self.speculation.may_propose(self.scheduler.running)):
            news, before = self._finish(before), None
        if (begun := self._execute()) is not None:
            if begun.structured:
                news += self._finish(before)
                before = None
            self._in_flight, ended = self._sample(begun)
        news += self._finish(before)
        if not self.scheduler.has_unfinished:  # what is still in flight was computed for nobody
            self._finish(self._in_flight)
            self._in_flight = None
        return _joined(news, ended)

    def _execute(self) -> _Begun | None:
        drafts = self.speculation.propose(self.scheduler.running, self.structured)
        schedule = self.scheduler.schedule(drafts)
        if not schedule.num_scheduled_tokens:
            return None
        self.num_steps += 1
        if self.on_schedule is not None:
            self.on_schedule(schedule)
        structured = self.runner.execute_model(schedule)
        return _Begun(schedule, [self.scheduler.request(request_id) for request_id in structured])

    def _sample(self, begun: _Begun) -> tuple[tuple[Schedule, SampledTokens], list[Request]]:
        """The step in flight; and the requests that their grammars ended."""
        if not begun.structured:
            return (begun.schedule, self.runner.sample_tokens()), []
        masks, ended = self.structured.masks(begun.structured, begun.schedule.draft_token_ids)
        sampled = self.runner.sample_tokens(masks)
        self._abort(request.request_id for request in ended)
        return (begun.schedule, sampled), ended

    def _finish(self, step: tuple[Schedule, SampledTokens] | None) -> News:
        if step is None:
            return []
        schedule, sampled = step
        result = sampled.result()
        news = self.scheduler.update(schedule, result)
        self.speculation.observe(schedule, result)
        self.speculation.forget([request for request, _ in news if request.is_finished])
        ended = self.structured.advance(news)
        self._abort(request.request_id for request in ended)
        return news


def _joined(news: News, ended: list[Request]) -> News:
    """Nobody is in the news twice."""
    known = {request for request, _ in news}
    return news + [(request, []) for request in ended if request not in known]
