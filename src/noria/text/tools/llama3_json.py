"""Llama 3: {"name": ..., "parameters": {...}} at the beginning of a line or after <|python_tag|>; several are parted by
a semicolon. Only the names of tools that there are make it a call, for an answer may be JSON as well."""

from __future__ import annotations

from noria.text.tools.call_scan import CallScanner
from noria.text.tools.json_calls import JsonCallParser
from noria.text.tools.json_scan import WHITESPACE
from noria.text.tools.structure import Spelling


class Llama3JsonParser(JsonCallParser):
    MARKERS = ("<|python_tag|>",)
    OPENERS = "{"
    SPELLING = Spelling('{"name": NAME, "parameters": ', "}", between="; ")

    def _new_scanner(self) -> CallScanner:
        return CallScanner(self._tools, keys=("type", "id"))

    def _open(self, opening: str) -> None:
        self._read_object(self._after_object)
        if opening == "{":
            self._scanner.feed(opening)

    def _after_object(self) -> None:
        self._state = self._between

    def _between(self, char: str) -> None:
        """A separator and another call, or content."""
        if char in WHITESPACE or (char in ";," and not self._held):
            self._held += char if self._held or char in ";," else ""
        elif char == "{":
            self._held += char
            self._read_object(self._after_object)
            self._scanner.feed(char)
        else:
            instead = self._held + char
            self._end_call()
            for each in instead:
                self._state(each)
