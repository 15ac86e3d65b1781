"""Calls as a list in Python, [f(a=1, b="x"), g()]: Llama 3.2, ToolACE, and Llama 4 within <|python_start|> and
<|python_end|>.

The list stands at the beginning of a line. Only the names of tools that there are make it a call.
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection

from noria.text.tools.base import ToolParser
from noria.text.tools.json_scan import WHITESPACE
from noria.text.tools.python_scan import PythonScanner

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class PythonicParser(ToolParser):
    MARKERS = (_START,)
    OPENERS = "["

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._is_marked = False
        self._name = ""  # of the call
        self._keyword = ""
        self._keywords: set[str] = set()  # of this call, before that one
        self._value = PythonScanner()

    def _open(self, opening: str) -> None:
        self._is_marked = opening == _START
        self._name = ""
        self._state = self._bracket if self._is_marked else self._in_name

    def _bracket(self, char: str) -> None:
        if char not in WHITESPACE and char != "[":
            self._no_call(char)
            return
        self._held += char
        if char == "[":
            self._state = self._in_name

    def _in_name(self, char: str) -> None:
        if char in _NAME or (char in WHITESPACE and not self._name):
            self._name += char.strip()
        elif char == "(" and self._name in self._tools:
            self._keyword, self._keywords = "", set()
            self._state = self._in_first_keyword
        else:
            self._no_call(char)
            return
        self._held += char

    def _in_first_keyword(self, char: str) -> None:
        """Up to here it may be a text in brackets; with a keyword, or with none at all, it is a call."""
        if char == ")" and not self._keyword:
            self._tell_call(self._name)
            self._tell_arguments("{}")
            self._state = self._after_one
        elif char == "=" and self._keyword:
            self._tell_call(self._name)
            self._begin_value("{")
        else:
            self._spell(char)

    def _in_keyword(self, char: str) -> None:
        if char == ")" and not self._keyword:
            self._held = ""
            self._tell_arguments("}")
            self._state = self._after_one
        elif char == "=" and self._keyword and self._keyword.rstrip(WHITESPACE) not in self._keywords:
            self._begin_value(", ")
        else:
            self._spell(char)

    def _spell(self, char: str) -> None:
        """The next character of a keyword, or white space around it."""
        keyword = (self._keyword + char).lstrip(WHITESPACE)
        if not all(each in _NAME for each in keyword.rstrip(WHITESPACE)):
            self._no_call(char)
            return
        self._keyword = keyword
        self._held += char

    def _begin_value(self, before: str) -> None:
        name = self._keyword.rstrip(WHITESPACE)
        self._keywords.add(name)
        self._tell_arguments(f"{before}{json.dumps(name)}: ")
        self._held, self._value = "", PythonScanner()
        self._state = self._in_value

    def _in_value(self, char: str) -> None:
        if char in ",)" and self._value.may_end and (text := self._value.end()) is not None:
            self._tell_arguments(text + ("}" if char == ")" else ""))
            self._held = self._keyword = ""
            self._state = self._after_one
            if char == ",":
                self._held = char
                self._state = self._in_keyword
            return
        text = self._value.feed(char)
        if text is None:
            self._no_call(char)
            return
        self._held = "" if text else self._held + char  # what a scanner keeps for itself would be lost if it broke
        self._tell_arguments(text)

    def _after_one(self, char: str) -> None:
        """A comma and the next call, or the end of the list."""
        if char == "]":
            self._held = ""
            self._state = self._end_marker
            if not self._is_marked:
                self._end_call()
        elif char == "," and not self._held:
            self._held, self._name = char, ""
            self._state = self._in_next_name
        elif char not in WHITESPACE:
            self._no_call(char)

    def _in_next_name(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "]":
            self._after_one(char)
        else:
            self._state = self._in_name
            self._in_name(char)

    def _end_marker(self, char: str) -> None:
        if not self._held and char in WHITESPACE:
            return
        self._held += char
        if self._held == _END:
            self._end_call()
        elif not _END.startswith(self._held):
            instead = self._held
            self._end_call()
            for each in instead:
                self._state(each)
