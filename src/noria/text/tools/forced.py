"""The format of calls that structured output makes a model write when its own is not known, or none for a grammar."""

from __future__ import annotations

from noria.text.tools.json_calls import JsonCallParser
from noria.text.tools.structure import Spelling

FORCED_SPELLING = Spelling('{"name": NAME, "parameters": ', "}", before="[", between=", ", after="]")


class ForcedParser(JsonCallParser):
    """The answer is an array of calls, [{"name": ..., "parameters": {...}}, ...]."""

    OPENERS = "["
    SPELLING = FORCED_SPELLING

    def _open(self, opening: str) -> None:
        self._read_array()
