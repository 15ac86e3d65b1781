"""Stop strings: ends a text at the first of several strings, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that arrives in pieces for any of `stops`.

    The stop string whose last character comes first wins; among several that end at the same character, the longest.
    That choice needs no look-ahead, so the result does not depend on how the text was cut. Without
    `include_in_output` the text ends before the winning stop string, else right after it.

    Each stop string has a matcher after Knuth, Morris and Pratt (Fast pattern matching in strings, 1977), whose state
    is the length of the longest beginning of the stop string that the text ends with. The longest of those is what
    must be held back, and a character costs the same however long the text and the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """Takes the next piece and returns what is safe to emit; after a match always "".

        With check=False (the engine's min_tokens) no stop string can end within this piece, but one may begin in it
        and end in a later piece that is checked.
        """
        if self.matched is not None:
            return ""
        if not self._matchers:
            return text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete and check:
                self.matched = max(complete, key=len)
                self._held = ""
                return held[: position if self._include else position - len(self.matched)]
        keep = max(matcher.state for matcher in self._matchers)
        safe = len(held) - keep
        self._held = held[safe:]
        return held[:safe]

    def finish(self) -> str:
        """What was held back, once no more text comes; "" after a match."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """state: how many characters of `stop` the text seen so far ends with, short of all of them."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._border = _borders(stop)

    def advance(self, char: str) -> bool:
        """Takes one character; whether the text now ends with `stop`."""
        stop, state = self.stop, self.state
        while state and stop[state] != char:
            state = self._border[state - 1]
        if stop[state] == char:
            state += 1
        complete = state == len(stop)
        self.state = self._border[state - 1] if complete else state
        return complete


def _borders(pattern: str) -> list[int]:
    """For each beginning of `pattern`: the length of its longest proper beginning that is also its end."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        borders[position] = length
    return borders
