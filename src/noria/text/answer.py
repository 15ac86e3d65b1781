"""What is in a model's answer: reasoning first, and tool calls in what comes after it."""

from __future__ import annotations

from collections.abc import Iterable

from noria.text.deltas import CallDelta, ContentDelta, Delta, merged
from noria.text.reasoning.base import ReasoningParser
from noria.text.tools.base import ToolParser


class AnswerParser:
    """Takes one answer in pieces (`push`, then `finish`) and tells what is in it, in order.

    Without a parser of either kind, that kind does not occur, and all of it is content. max_calls: further calls are
    left out, and what comes after them; None: no limit.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._full = False

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str) -> list[Delta]:
        first: list[Delta] = [ContentDelta(text)] if self._reasoning is None else self._reasoning.push(text)
        return merged(self._kept(self._with_calls(first)))

    def finish(self) -> list[Delta]:
        """What was held back, when the answer has ended."""
        first = [] if self._reasoning is None else self._reasoning.finish()
        last = [] if self._tools is None else self._tools.finish()
        return merged(self._kept([*self._with_calls(first), *last]))

    def _with_calls(self, deltas: Iterable[Delta]) -> Iterable[Delta]:
        for delta in deltas:
            if self._tools is not None and isinstance(delta, ContentDelta):
                yield from self._tools.push(delta.text)
            else:
                yield delta

    def _kept(self, deltas: Iterable[Delta]) -> Iterable[Delta]:
        for delta in deltas:
            if self._max_calls is not None and isinstance(delta, CallDelta) and delta.index >= self._max_calls:
                self._full = True
            if not self._full:
                yield delta
