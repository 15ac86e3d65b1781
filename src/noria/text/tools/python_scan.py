"""A Python literal, accepted a character at a time and written as JSON."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from noria.text.tools.json_scan import WHITESPACE

_WORDS: Mapping[str, str] = MappingProxyType(
    {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
)
_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_+-.")
_ESCAPES: Mapping[str, str] = MappingProxyType(
    {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
)
_HEX_DIGITS: Mapping[str, int] = MappingProxyType({"x": 2, "u": 4, "U": 8})
_CLOSERS: Mapping[str, str] = MappingProxyType({"[": "]", "(": ")", "{": "}"})
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_MAX_DIGITS = 4000  # Python itself reads no longer integers


class _At(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # the container may end here
    KEY_OR_END = auto()
    COLON = auto()
    WORD = auto()  # a number, or a name like True
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    AFTER = auto()


class PythonScanner:
    """Strings, numbers, True, False, None, and lists, tuples and dicts (whose keys are strings) of them.

    Not Python's whole grammar: no prefixes, no triple quotes, no octal or named escapes, no two strings side by side.
    """

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._closers: list[str] = []
        self._comma = ""  # before the next element; JSON has none before the end
        self._word = ""
        self._quote = ""
        self._in_key = False
        self._digits = ""  # of an escape so far
        self._num_digits = 0

    @property
    def may_end(self) -> bool:
        """Whether a comma or bracket that comes next is not part of the value."""
        return not self._closers and self._at in (_At.WORD, _At.AFTER)

    def end(self) -> str | None:
        """The JSON text that is still missing when the value ends here; None when it is no value."""
        return _word_as_json(self._word) if self._at is _At.WORD else ""

    def feed(self, char: str) -> str | None:
        """Takes a character; returns the JSON text that is certain now, or None when the character cannot come here."""
        match self._at:
            case _At.STRING:
                return self._feed_string(char)
            case _At.ESCAPE:
                return self._feed_escape(char)
            case _At.HEX:
                return self._feed_hex(char)
            case _At.WORD:
                return self._feed_word(char)
        if char in WHITESPACE:
            return ""
        return self._feed_structure(char)

    def _feed_string(self, char: str) -> str:
        if char == self._quote:
            self._at = _At.COLON if self._in_key else _At.AFTER
            return '"'
        if char == "\\":
            self._at = _At.ESCAPE
            return ""
        return _in_string(char)

    def _feed_escape(self, char: str) -> str | None:
        self._at = _At.STRING
        if char in _ESCAPES:
            return _in_string(_ESCAPES[char])
        if char in _HEX_DIGITS:
            self._at, self._digits, self._num_digits = _At.HEX, "", _HEX_DIGITS[char]
            return ""
        if char == "\n":
            return ""
        return None if char in string.digits or char == "N" else _in_string(f"\\{char}")

    def _feed_hex(self, char: str) -> str | None:
        if char not in string.hexdigits:
            return None
        self._digits += char
        if len(self._digits) < self._num_digits:
            return ""
        self._at, code = _At.STRING, int(self._digits, 16)
        if code > 0x10FFFF:
            return None
        # Half of a surrogate pair stays an escape: with its other half it is one character again.
        return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else _in_string(chr(code))

    def _feed_word(self, char: str) -> str | None:
        if char in _WORD_CHARS:
            self._word += char
            return ""
        begin, self._at = _word_as_json(self._word), _At.AFTER
        rest = self.feed(char)
        return None if begin is None or rest is None else begin + rest

    def _feed_structure(self, char: str) -> str | None:
        at = self._at
        if self._closers and char == self._closers[-1] and at in (_At.AFTER, _At.VALUE_OR_END, _At.KEY_OR_END):
            self._at, self._comma = _At.AFTER, ""
            return "}" if self._closers.pop() == "}" else "]"
        if at is _At.AFTER and self._closers and char == ",":
            self._at = _At.KEY_OR_END if self._closers[-1] == "}" else _At.VALUE_OR_END
            self._comma = ", "
            return ""
        if at is _At.COLON and char == ":":
            self._at = _At.VALUE
            return ": "
        if at is _At.KEY_OR_END and char in "'\"":
            return self._take_comma() + self._begin_string(char, in_key=True)
        if at in (_At.VALUE, _At.VALUE_OR_END):
            return self._begin_value(char)
        return None

    def _begin_value(self, char: str) -> str | None:
        comma = self._take_comma()
        if char in "'\"":
            return comma + self._begin_string(char, in_key=False)
        if char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self._at = _At.KEY_OR_END if char == "{" else _At.VALUE_OR_END
            return comma + ("{" if char == "{" else "[")
        if char in _WORD_CHARS:
            self._at, self._word = _At.WORD, char
            return comma
        return None

    def _begin_string(self, quote: str, *, in_key: bool) -> str:
        self._at, self._quote, self._in_key = _At.STRING, quote, in_key
        return '"'

    def _take_comma(self) -> str:
        comma, self._comma = self._comma, ""
        return comma


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _word_as_json(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if not word.isascii() or len(word) > _MAX_DIGITS or word.strip("+-")[:1].isalpha():
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
