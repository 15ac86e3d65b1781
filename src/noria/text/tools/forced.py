"""The formats of calls that structured output enforces (tool_choice required or named), whatever the model's own is."""

from __future__ import annotations

from noria.text.tools.base import ToolParser
from noria.text.tools.json_calls import JsonCallParser
from noria.text.tools.json_scan import JsonScanner


class RequiredParser(JsonCallParser):
    """The answer is an array of calls, [{"name": ..., "parameters": {...}}, ...]."""

    OPENERS = "["

    def _open(self, opening: str) -> None:
        self._read_array()


class NamedParser(ToolParser):
    """The answer is the arguments of the one tool."""

    OPENERS = "{"

    def _open(self, opening: str) -> None:
        [name] = self._tools
        self._tell_call(name)
        self._json = JsonScanner()
        self._state = self._in_arguments
        self._in_arguments(opening)

    def _in_arguments(self, char: str) -> None:
        text = self._json.feed(char)
        if text is None:
            self._no_call(char)
            return
        self._tell_arguments(text)
        if self._json.done:
            self._end_call()
