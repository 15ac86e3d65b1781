"""Tells what a model thinks from what it answers: the same contract as that of tool-call parsers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noria.text.deltas import ContentDelta, Delta, ReasoningDelta, merged

_WHITESPACE = " \t\r\n"
Thinking = Literal["begun", "maybe", "never"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str  # the marker that reasoning begins with
    end: str
    is_implied: bool = False  # the model thinks first, also where nothing says that it begins to

    def thinking(self, prompt: str) -> Thinking:
        """What the answer to a prompt begins with: templates may open the reasoning, or close it to have none.

        Only the very end of the prompt counts. What stands before it may be a user's text about markers.
        """
        prompt = prompt.rstrip(_WHITESPACE)
        if prompt.endswith(self.end):
            return "never"
        return "begun" if self.is_implied or prompt.endswith(self.begin) else "maybe"

    def parser(self, prompt: str) -> ReasoningParser:
        """For one answer to a prompt."""
        thinking = self.thinking(prompt)
        return ReasoningParser(self, begun=thinking == "begun", may_begin=thinking != "never")


class ReasoningParser:
    """Takes one answer in pieces (`push`, then `finish`).

    There is at most one block of reasoning, at the beginning; one that is not closed lasts to the end. The markers and
    white space next to them are dropped, and every other character is told. A state machine over characters, so it
    does not matter how the text is cut.
    """

    def __init__(self, markers: ReasoningFormat, *, begun: bool, may_begin: bool) -> None:
        """begun: the prompt opened the reasoning. may_begin: else, the answer may."""
        self._markers = markers
        self._begun = begun
        self._state: Callable[[str], None] = self._before if may_begin else self._content
        self._news: list[Delta] = []
        self._space = ""
        self._held = ""  # what may be (the beginning of) a marker
        self._drops_space = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character is, as far as one knows."""
        return self._state == self._reasoning or (self._state == self._before and self._begun)

    def push(self, text: str) -> list[Delta]:
        if self._state == self._content and not self._drops_space:
            self._news.append(ContentDelta(text))
        elif self._state == self._reasoning and self._is_plain(text):
            self._news.append(ReasoningDelta(text))
        else:
            for char in text:
                self._state(char)
        return self._take_news()

    def finish(self) -> list[Delta]:
        rest, self._space, self._held = self._space + self._held, "", ""
        self._news.append(ReasoningDelta(rest) if self.is_reasoning else ContentDelta(rest))
        return self._take_news()

    def _take_news(self) -> list[Delta]:
        news, self._news = self._news, []
        return merged(news)

    def _before(self, char: str) -> None:
        """The marker at the very beginning, which is there or not."""
        begin = self._markers.begin
        if not self._held and char in _WHITESPACE:
            self._space += char
            return
        self._held += char
        if self._held == begin:
            self._space = self._held = ""
            self._state, self._drops_space = self._reasoning, True
        elif not begin.startswith(self._held):
            text = self._held if self._begun else self._space + self._held
            self._space = self._held = ""
            self._state = self._reasoning if self._begun else self._content
            for each in text:
                self._state(each)

    def _reasoning(self, char: str) -> None:
        end = self._markers.end
        self._held += char
        while self._held and not end.startswith(self._held):
            first, self._held = self._held[0], self._held[1:]
            if first in _WHITESPACE:
                self._space += "" if self._drops_space else first
            else:
                self._news.append(ReasoningDelta(self._space + first))
                self._space, self._drops_space = "", False
        if self._held == end:
            self._space = self._held = ""
            self._state, self._drops_space = self._content, True

    def _content(self, char: str) -> None:
        if not (self._drops_space and char in _WHITESPACE):
            self._news.append(ContentDelta(char))
            self._drops_space = False

    def _is_plain(self, text: str) -> bool:
        """For speed: no marker begins in it, and it ends with what is told at once."""
        held = self._held or self._space or self._drops_space
        return not held and self._markers.end[0] not in text and text[-1:] not in ("", *_WHITESPACE)
