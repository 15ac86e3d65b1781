"""The contract of tool-call parsers, and what all of them do with the text around calls.

A parser is a state machine over characters, so how a text was cut into pieces cannot matter, and a whole answer is
read by the same code as a streamed one.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from noria.text.deltas import CallDelta, ContentDelta, Delta, merged
from noria.text.tools.json_scan import WHITESPACE
from noria.text.tools.structure import Spelling


class ToolParser(ABC):
    """Takes one answer in pieces (`push`, then `finish`) and tells content from tool calls.

    - A call is told as soon as its name is certain, and its arguments as they come: JSON text, whose pieces make up
      one object. A call without arguments has "{}".
    - What may still become a call is held back; when it turns out not to be one, all of it is content.
    - White space next to a call belongs to the format and is dropped; all other text is content.
    - A call that breaks after it was told keeps the arguments it got, which then are no JSON, and what follows is
      content. So it is with an answer that was cut off, which is why nothing is ever made up to complete it.

    Nothing in a text is an error. Subclasses set `self._state` to the method that takes the next character.
    """

    MARKERS: ClassVar[tuple[str, ...]] = ()  # what a call may begin with, anywhere
    OPENERS: ClassVar[str] = ""  # characters that may begin a call at the beginning of a line
    SPELLING: ClassVar[Spelling | None] = None  # of the calls it reads; None: no grammar can tell arguments like these

    def __init__(self, tools: Collection[str]) -> None:
        """tools: their names. Formats without a marker take nothing else for a call."""
        self._tools = frozenset(tools)
        self._state: Callable[[str], None] = self._content
        self._news: list[Delta] = []
        self._num_calls = 0
        self._space = ""  # white space that is content unless a call follows
        self._held = ""  # what may be (the beginning of) a call
        self._is_line_start = True  # the answer's leading white space does not count
        self._has_content = False
        self._after_call = False  # no content came since

    @property
    def num_calls(self) -> int:
        """Calls that were told."""
        return self._num_calls

    def push(self, text: str) -> list[Delta]:
        """What the next piece of the answer makes certain, in order."""
        if self._is_plain(text):
            self._say(text)
        else:
            for char in text:
                self._state(char)
        return self._take_news()

    def finish(self) -> list[Delta]:
        """What was held back, when the answer has ended."""
        self._drop_call()
        self._say(self._space)
        self._space = ""
        return self._take_news()

    @staticmethod
    def new_id() -> str:
        """Of a call."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    def spelling(cls, template: str) -> Spelling | None:
        """As the model with that chat template writes them."""
        return cls.SPELLING

    @abstractmethod
    def _open(self, opening: str) -> None:
        """A marker or an opener was found, and is held: set the state that takes what follows it."""

    def _drop_call(self) -> None:
        """What is held is no call: it is content, with the white space before it."""
        space, held, self._space, self._held = self._space, self._held, "", ""
        self._state = self._content
        if held:
            self._say(space + held)
        else:
            self._space = space

    def _no_call(self, char: str) -> None:
        """The same, because of a character that does not belong to it and may begin another."""
        self._drop_call()
        self._state(char)

    def _tell_call(self, name: str, call_id: str | None = None) -> None:
        self._news.append(CallDelta(self._num_calls, "", name, call_id or self.new_id()))
        self._num_calls += 1
        self._space = self._held = ""

    def _tell_arguments(self, text: str) -> None:
        self._news.append(CallDelta(self._num_calls - 1, text))

    def _end_call(self) -> None:
        """Back to content."""
        self._space = self._held = ""
        self._state = self._content
        self._after_call = self._is_line_start = True

    def _say(self, text: str) -> None:
        if text:
            self._news.append(ContentDelta(text))
            self._has_content, self._after_call = True, False
            self._is_line_start = text[-1] == "\n"

    def _take_news(self) -> list[Delta]:
        news, self._news = self._news, []
        return merged(news)

    def _content(self, char: str) -> None:
        if not self._held and char in self.OPENERS and self._is_line_start:
            self._held = char
            self._open(char)
            return
        self._held += char
        while self._held and not any(marker.startswith(self._held) for marker in self.MARKERS):
            first, self._held = self._held[0], self._held[1:]
            self._put(first)
        if self._held in self.MARKERS:
            self._open(self._held)

    def _put(self, char: str) -> None:
        """A character that begins no marker."""
        if char not in WHITESPACE:
            space, self._space = self._space, ""
            self._say(space + char)
            self._is_line_start = False
        elif not self._after_call:
            self._space += char
            self._is_line_start = char == "\n" or (self._is_line_start and not self._has_content)

    def _is_plain(self, text: str) -> bool:
        """Whether it can be said as it is: for speed, as most text can."""
        return (
            self._state == self._content
            and not (self._held or self._space or self._is_line_start)
            and text[-1:] not in ("", *WHITESPACE)
            and not any(marker[0] in text for marker in self.MARKERS)
            and not (self.OPENERS and "\n" in text)
        )
