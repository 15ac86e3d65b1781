"""Hermes and Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call."""

from __future__ import annotations

from noria.text.tools.json_calls import JsonCallParser
from noria.text.tools.json_scan import WHITESPACE
from noria.text.tools.structure import Spelling

_END = "</tool_call>"


class HermesParser(JsonCallParser):
    MARKERS = ("<tool_call>",)
    SPELLING = Spelling('<tool_call>\n{"name": NAME, "arguments": ', f"}}\n{_END}", between="\n", trigger="<tool_call>")

    def _open(self, opening: str) -> None:
        self._read_object(self._after_object)

    def _after_object(self) -> None:
        self._state = self._end_marker

    def _end_marker(self, char: str) -> None:
        """Models forget it: then the call has ended all the same, and what came instead is content."""
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
