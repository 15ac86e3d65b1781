"""Requests that follow a grammar: they wait until it is compiled, and then have a matcher each."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from noria.config import StructuredOutputsParams
from noria.engine.request import FinishReason, Request
from noria.errors import RequestError
from noria.grammar.compiler import TIMEOUT_S, GrammarCompiler, too_long
from noria.grammar.matcher import Matcher
from noria.scheduler.schedule import GrammarMasks

_log = logging.getLogger(__name__)
_NO_DRAFTS: Mapping[str, list[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Compiling:
    future: Future[Matcher]
    deadline: float  # in time.monotonic()


class StructuredRequests:
    """From `add` to `forget`. A matcher is advanced when the host takes tokens, and by nothing else: so
    a prompt in chunks, a preemption and a token that is dropped leave no trace in it."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        """vocab_size: of the model."""
        self.compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._compiling: dict[Request, _Compiling] = {}
        self._matchers: dict[Request, Matcher] = {}

    def add(self, request: Request) -> bool:
        """Whether the request can run at once; if not, `settle` says when."""
        params = request.sampling_params.structured_outputs
        if params is None:
            return True
        future = self.compiler.compile(params)
        if future.done() and future.exception() is None:
            self._matchers[request] = future.result().copy()
            return True
        self._compiling[request] = _Compiling(future, time.monotonic() + TIMEOUT_S)
        return False

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def settle(self) -> tuple[list[Request], list[Request]]:
        """Those whose grammar is ready now, and those that failed: they are finished, with the error as stop_reason."""
        ready, failed = [], []
        for request, waiting in list(self._compiling.items()):
            if waiting.future.done():
                error = waiting.future.exception()
            elif time.monotonic() > waiting.deadline:
                error = too_long(_params(request))
            else:
                continue
            del self._compiling[request]
            if error is None:
                self._matchers[request] = waiting.future.result().copy()
                ready.append(request)
            else:
                self._fail(request, str(error) if isinstance(error, RequestError) else repr(error))
                failed.append(request)
        return ready, failed

    def wait(self, timeout_s: float) -> None:
        """Until a grammar is ready, or so long."""
        futures = [waiting.future for waiting in self._compiling.values()]
        concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def advance(self, news: Iterable[tuple[Request, list[int]]]) -> list[Request]:
        """Takes the tokens that requests got. Returns those that this finished."""
        finished = []
        for request, token_ids in news:
            matcher = self._matchers.get(request)
            if matcher is None:
                continue
            if request.is_finished:
                del self._matchers[request]
                continue
            for token_id in token_ids:
                matcher.accept(token_id)
            if matcher.error is not None:
                self._fail(request, _in_context(request, matcher.error))
            elif matcher.has_ended:  # with ignore_eos it is no stop token, but the text is complete
                request.finish(FinishReason.STOP, token_ids[-1])
            if request.is_finished:
                finished.append(request)
        return finished

    def cut(self, request: Request, drafts: list[int]) -> list[int]:
        """The drafts up to the first that the grammar refuses; none before min_tokens, where a grammar that is complete
        ends the request by a rule of its own, see masks."""
        if (matcher := self._matchers.get(request)) is None:
            return drafts
        return [] if _forbids_end(request) else drafts[: matcher.allowed(drafts)]

    def masks(
        self, requests: Iterable[Request], drafts: Mapping[str, list[int]] = _NO_DRAFTS
    ) -> tuple[GrammarMasks, list[Request]]:
        """Of those that are not finished; and those that this finishes: their grammar turned out to be too much, or is
        complete while min_tokens forbids every token that could end it. drafts: by request id; see GrammarMasks."""
        alive = [request for request in requests if not request.is_finished]
        parts, names, finished = [np.empty((0, self._num_words), np.int32)], list[str](), []
        for request in alive:
            matcher, guesses = self._matchers[request], drafts.get(request.request_id, [])
            rows = np.full((len(guesses) + 1, self._num_words), -1, np.int32)
            matcher.fill_ahead(rows, guesses)
            if matcher.error is not None:
                self._fail(request, _in_context(request, matcher.error))
            elif _forbids_end(request) and matcher.allows_only_the_end(rows[0]):
                request.finish(FinishReason.STOP)
            if request.is_finished:
                rows[:] = -1
                finished.append(request)
            parts.append(rows)
            names += [request.request_id] * len(rows)
        return GrammarMasks(tuple(names), np.concatenate(parts)), finished

    def forget(self, requests: Iterable[Request]) -> None:
        """Of finished requests."""
        for request in requests:
            self._compiling.pop(request, None)
            self._matchers.pop(request, None)

    def _fail(self, request: Request, error: str) -> None:
        _log.error("request %s: its grammar failed: %s", request.request_id, error)
        request.finish(FinishReason.ERROR, error)


def _forbids_end(request: Request) -> bool:
    return request.num_output_tokens < request.sampling_params.min_tokens


def _in_context(request: Request, error: str) -> str:
    return f"structured_outputs: {_params(request).kind} failed after {request.num_output_tokens} tokens: {error}"


def _params(request: Request) -> StructuredOutputsParams:
    params = request.sampling_params.structured_outputs
    assert params is not None
    return params
