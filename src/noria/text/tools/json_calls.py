"""What the formats that write calls as JSON objects share: one object, or an array of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from noria.text.tools.base import ToolParser
from noria.text.tools.call_scan import CallScanner
from noria.text.tools.json_scan import WHITESPACE


class JsonCallParser(ToolParser):
    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._scanner = self._new_scanner()
        self._told = False  # the call that is read
        self._then: Callable[[], None] = self._end_call

    def _new_scanner(self) -> CallScanner:
        return CallScanner()

    def _read_object(self, then: Callable[[], None]) -> None:
        """The next characters are a call; `then` is done when it is complete."""
        self._scanner, self._told, self._then = self._new_scanner(), False, then
        self._state = self._object

    def _object(self, char: str) -> None:
        scanner = self._scanner
        if not scanner.feed(char):
            self._no_call(char)
            return
        if not self._told:
            self._held += char
            if scanner.is_call and scanner.name is not None:
                self._told = True
                self._tell_call(scanner.name)
            elif scanner.done:
                self._drop_call()
                return
        if self._told:
            self._tell_arguments(scanner.take_arguments())
            if scanner.done:
                self._then()

    # ---------------------------------------------------------------------------------------- an array of objects

    def _read_array(self) -> None:
        """What is held ends with the bracket that opens one."""
        self._read_object(self._after_element)

    def _after_element(self) -> None:
        self._state = self._comma_or_end

    def _comma_or_end(self, char: str) -> None:
        if char == "]":
            self._end_call()
        elif char == ",":
            self._held = char
            self._read_object(self._after_element)
        elif char not in WHITESPACE:
            self._no_call(char)
