"""Finds the tokens that stand for themselves in a text: control tokens and user-defined ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class LiteralTokens:
    """Cuts a text at literal tokens: the leftmost first, the longest of those that begin at one place.

    That is SentencePiece's rule for user-defined symbols (prefix_matcher) and the one of the `tokenizers` package.
    tokens: text -> id.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[:2], set()).add(len(text))
        # By the first two characters (of a token of one: by that) the lengths to try. With thousands of tokens (Gemma
        # has 6000) that is faster than one alternation of them all, and two tell a run of spaces from a single one.
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        first = "".join(map(re.escape, sorted({text[0] for text in self._tokens})))
        self._candidates = re.compile(f"[{first}]" if first else r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """Yields the text between literal tokens as str (never empty) and each literal token as its id."""
        start = position = 0
        while candidate := self._candidates.search(text, position):
            position = candidate.start()
            token, size = self._match(text, position)
            if token is None:
                position += 1
                continue
            if start < position:
                yield text[start:position]
            yield token
            start = position = position + size
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, position: int) -> tuple[int | None, int]:
        start = text[position : position + 2]
        for size in (*self._lengths.get(start, ()), 1):
            token = self._tokens.get(text[position : position + size])
            if token is not None:
                return token, size
        return None, 0
