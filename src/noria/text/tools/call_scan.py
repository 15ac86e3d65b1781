"""A tool call written as a JSON object, {"name": ..., "arguments": {...}}, read a character at a time."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from noria.text.tools.json_scan import WHITESPACE, At, JsonScanner

_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Finds the name and the text of the arguments; the keys may come in any order.

    The arguments are an object, the JSON text of one as a string, null, or left out; the last two are "{}".
    known: names that a call may have; None: any. keys: what the object may have beside those of a call; None: anything.
    """

    def __init__(self, known: Collection[str] | None = None, keys: Collection[str] | None = None) -> None:
        self._known = known
        self._keys = keys
        self._json = JsonScanner()
        self._seen: set[str] = set()
        self._key = ""  # whose value is read, when it is one of those that count
        self._text = ""  # of the key, the name or a quoted object so far
        self._in_value = False
        self._arguments = ""  # not taken yet
        self._begun = False  # there are arguments
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._json.done

    @property
    def is_call(self) -> bool:
        """Whether it is certain enough to be a call to be announced as one."""
        return self.name is not None and (self._begun or self.done)

    def take_arguments(self) -> str:
        """What is new of their text."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def feed(self, char: str) -> bool:
        """Takes a character; False when it makes this no call (any more)."""
        scanner = self._json
        at, depth = scanner.at, scanner.depth
        if depth == 0 and char not in WHITESPACE and char != "{":
            return False
        text = scanner.feed(char)
        if text is None or not self._place(at, depth, text):
            return False
        if scanner.done and self.name is not None and not self._begun:
            self._arguments = "{}"
        return True

    def _place(self, at: At, depth: int, text: str) -> bool:
        """at, depth: before `text` was taken."""
        scanner = self._json
        if self._in_value:
            return self._continue_value(text)
        if depth != 1:
            return True
        if at in (At.KEY, At.FIRST_KEY) and scanner.at is At.STRING:
            self._text = text
        elif at in (At.STRING, At.ESCAPE, At.HEX):
            self._text += text
            return scanner.at is not At.COLON or self._begin_entry()
        elif at is At.VALUE and scanner.at is not At.VALUE:
            self._in_value = True
            return self._begin_value(text)
        return True

    def _begin_entry(self) -> bool:
        key = json.loads(self._text)
        counts = key == "name" or key in _ARGUMENTS
        role = "arguments" if key in _ARGUMENTS else key
        if (counts and role in self._seen) or not (counts or self._keys is None or key in self._keys):
            return False
        self._seen.add(role)
        self._key = role if counts else ""
        return True

    def _begin_value(self, text: str) -> bool:
        self._text = ""
        if self._key == "name" and text != '"':
            return False
        if self._key == "arguments":
            self._begun = text == "{"
            if text not in '{"n':
                return False
        return self._continue_value(text)

    def _continue_value(self, text: str) -> bool:
        scanner = self._json
        self._in_value = not scanner.done and (scanner.depth > 1 or scanner.at not in (At.AFTER, At.KEY))
        if self._key == "arguments" and self._begun:
            self._arguments += text
        elif self._key:
            self._text += text
            return self._in_value or self._end_value()
        return True

    def _end_value(self) -> bool:
        value: Any = json.loads(self._text)
        if self._key == "name":
            self.name = value
            return bool(value) and _is_text(value) and (self._known is None or value in self._known)
        if value is not None and value.strip():
            if not _is_object(value):
                return False
            self._begun, self._arguments = True, value
        return True


def _is_text(text: str) -> bool:
    """Not with half of a surrogate pair, which could not be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    stripped = text.strip(WHITESPACE)
    return (
        stripped[:1] == "{"
        and _is_text(text)
        and all(not scanner.done and scanner.feed(char) == char for char in stripped)
        and scanner.done
    )
