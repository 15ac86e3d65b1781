"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and since tokenizer v11 [TOOL_CALLS]name[ARGS]{...}
for each call, where [CALL_ID]id may stand between the two and [ARGS] may be missing."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection

from noria.text.tools.json_calls import JsonCallParser
from noria.text.tools.json_scan import WHITESPACE, JsonScanner
from noria.text.tools.structure import Spelling

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralParser(JsonCallParser):
    MARKERS = ("[TOOL_CALLS]",)
    SPELLING = Spelling('{"name": NAME, "arguments": ', "}", before="[TOOL_CALLS][", between=", ", after="]")

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._name = ""
        self._id = ""
        self._tag = ""  # the beginning of [ARGS] or [CALL_ID]
        self._json = JsonScanner()

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: its templates insist on that."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @classmethod
    def spelling(cls, template: str) -> Spelling | None:
        if _ARGS not in template:
            return cls.SPELLING
        marker = cls.MARKERS[0]
        return Spelling(f"{marker}NAME{_ARGS}", "", trigger=marker, quotes_name=False)

    def _open(self, opening: str) -> None:
        self._name = self._id = self._tag = ""
        self._state = self._first

    def _first(self, char: str) -> None:
        if char == "[":
            self._held += char
            self._read_array()
        elif char in WHITESPACE:
            self._held += char
        else:
            self._state = self._in_name
            self._in_name(char)

    def _in_name(self, char: str) -> None:
        if char in _NAME:
            self._held += char
            self._name += char
        elif not self._name or char not in "[{":
            self._no_call(char)
        else:
            self._in_tag(char)

    def _in_tag(self, char: str) -> None:
        """After the name or an id: tags and the object, in whose place nothing else may come."""
        if char == "{" and not self._tag:
            self._tell_call(self._name, self._id or None)
            self._json = JsonScanner()
            self._state = self._in_arguments
            self._in_arguments(char)
            return
        tag = self._tag + char
        if not (_ARGS.startswith(tag) or (_CALL_ID.startswith(tag) and not self._id)):
            self._no_call(char)
            return
        self._held += char
        self._tag = "" if tag in (_ARGS, _CALL_ID) else tag
        self._state = {_ARGS: self._before_object, _CALL_ID: self._in_id}.get(tag, self._in_tag)

    def _in_id(self, char: str) -> None:
        if char in _NAME:
            self._held += char
            self._id += char
        elif self._id and char == "[":
            self._in_tag(char)
        else:
            self._no_call(char)

    def _before_object(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "{":
            self._in_tag(char)
        else:
            self._no_call(char)

    def _in_arguments(self, char: str) -> None:
        text = self._json.feed(char)
        if text is None:
            self._no_call(char)
            return
        self._tell_arguments(text)
        if self._json.done:
            self._end_call()
