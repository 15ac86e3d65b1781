"""A JSON object, accepted a character at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

WHITESPACE = " \t\r\n"


class At(Enum):
    """What the next character is part of."""

    VALUE = auto()  # the beginning of a value
    FIRST_VALUE = auto()  # the same, or the end of an empty array
    KEY = auto()  # the beginning of a key
    FIRST_KEY = auto()  # the same, or the end of an empty object
    COLON = auto()
    AFTER = auto()  # a value is complete
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    NUMBER = auto()


_WORDS: Mapping[str, str] = MappingProxyType({"t": "rue", "f": "alse", "n": "ull"})
# Numbers of RFC 8259 as a finite automaton: state -> class of the character -> state. Digits: "0", or "1" for the rest.
_NUMBERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "begin": {"-": "minus", "0": "zero", "1": "whole"},
        "minus": {"0": "zero", "1": "whole"},
        "zero": {".": "point", "e": "exponent"},
        "whole": {"0": "whole", "1": "whole", ".": "point", "e": "exponent"},
        "point": {"0": "part", "1": "part"},
        "part": {"0": "part", "1": "part", "e": "exponent"},
        "exponent": {"+": "sign", "-": "sign", "0": "power", "1": "power"},
        "sign": {"0": "power", "1": "power"},
        "power": {"0": "power", "1": "power"},
    }
)
_COMPLETE = ("zero", "whole", "part", "power")


class JsonScanner:
    """Accepts one JSON object or array (RFC 8259), however deep, and stops where it stops being one.

    Control characters within strings, which JSON forbids and models write, are escaped.
    """

    def __init__(self) -> None:
        self.at = At.VALUE
        self.done = False  # the object is complete; nothing may be fed any more
        self._closers: list[str] = []  # of what is open
        self._in_key = False
        self._num_hex = 0  # digits of \uXXXX that are missing
        self._word = ""  # what is missing of true, false or null
        self._number = ""  # a state of _NUMBERS

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._closers)

    def feed(self, char: str) -> str | None:
        """Takes a character; returns the JSON text for it, or None when it cannot come here."""
        match self.at:
            case At.STRING:
                return self._feed_string(char)
            case At.ESCAPE:
                if char not in '"\\/bfnrtu':
                    return None
                self.at, self._num_hex = (At.HEX, 4) if char == "u" else (At.STRING, 0)
                return char
            case At.HEX:
                if char not in "0123456789abcdefABCDEF":
                    return None
                self._num_hex -= 1
                self.at = At.HEX if self._num_hex else At.STRING
                return char
            case At.WORD:
                if char != self._word[0]:
                    return None
                self._word = self._word[1:]
                self.at = At.WORD if self._word else At.AFTER
                return char
            case At.NUMBER:
                return self._feed_number(char)
        return char if char in WHITESPACE or self._feed_structure(char) else None

    def _feed_string(self, char: str) -> str:
        if char == '"':
            self.at = At.COLON if self._in_key else At.AFTER
        elif char == "\\":
            self.at = At.ESCAPE
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _feed_number(self, char: str) -> str | None:
        state = _NUMBERS[self._number].get(_class_of(char))
        if state is not None:
            self._number = state
            return char
        if self._number not in _COMPLETE or not (char in WHITESPACE or char in (",", self._closers[-1])):
            return None
        self.at = At.AFTER
        return self.feed(char)

    def _feed_structure(self, char: str) -> bool:
        at = self.at
        if at is At.AFTER and char == ",":
            self.at = At.KEY if self._closers[-1] == "}" else At.VALUE
        elif at in (At.AFTER, At.FIRST_VALUE, At.FIRST_KEY) and char == self._closers[-1]:
            self._closers.pop()
            self.at, self.done = At.AFTER, not self._closers
        elif at in (At.KEY, At.FIRST_KEY) and char == '"':
            self.at, self._in_key = At.STRING, True
        elif at is At.COLON and char == ":":
            self.at = At.VALUE
        elif at in (At.VALUE, At.FIRST_VALUE):
            return self._begin_value(char)
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self.at = At.FIRST_KEY if char == "{" else At.FIRST_VALUE
        elif not self._closers:
            return False
        elif char == '"':
            self.at, self._in_key = At.STRING, False
        elif char in _WORDS:
            self.at, self._word = At.WORD, _WORDS[char]
        elif (state := _NUMBERS["begin"].get(_class_of(char))) is not None:
            self.at, self._number = At.NUMBER, state
        else:
            return False
        return True


def _class_of(char: str) -> str:
    return "1" if char in "123456789" else "e" if char in "eE" else char
