"""Results on stdout: JSON lines, or a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from noria.cli.display import note


class Printer:
    """JSON lines, or a table whose rows appear one by one."""

    def __init__(self, as_json: bool, headings: Sequence[str], widths: Sequence[int]) -> None:
        """The first column is left-aligned."""
        self._json = as_json
        self._headings = headings
        self._widths = widths
        self._begun = False

    def line(self, figures: Mapping[str, Any], cells: Sequence[object]) -> None:
        if self._json:
            print(json.dumps(figures), flush=True)
            return
        if not self._begun:
            print(self._row(self._headings), flush=True)
            self._begun = True
        print(self._row(cells), flush=True)

    def head(self, figures: Mapping[str, Any], text: str) -> None:
        """A line before the table; with JSON it is one line more, else it goes to stderr."""
        if self._json:
            print(json.dumps(figures), flush=True)
        else:
            note(text)

    def _row(self, cells: Sequence[object]) -> str:
        first, *rest = (str(cell) for cell in cells)
        padded = [first.ljust(self._widths[0]), *(text.rjust(width) for text, width in zip(rest, self._widths[1:]))]
        return "  ".join(padded)
