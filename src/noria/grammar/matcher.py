"""The state of one sequence under a grammar: what it has generated so far, and which tokens may follow."""

from __future__ import annotations

import re
from collections.abc import Set

import numpy as np
from llguidance import LLMatcher

_EXCERPT = re.compile(r"\n +\d+ \| |\n?<(?:non-verbose/|state)>")


class Matcher:
    """After an error nothing but `error` has a meaning; it is this sequence's alone."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Set[int], num_tokens: int) -> None:
        """num_tokens: of the tokenizer's vocabulary."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_words = -(-num_tokens // 32)
        self.has_ended = False  # an end-of-sequence token was accepted

    def copy(self) -> Matcher:
        """An independent one in the same state."""
        copy = Matcher(self._matcher.deep_copy(), self._eos_token_ids, 32 * self._num_words)
        copy.has_ended = self.has_ended
        return copy

    @property
    def error(self) -> str | None:
        """In one line, without what the sequence has generated."""
        if not self._matcher.is_error():
            return None
        return _one_line(self._matcher.get_error())

    def accept(self, token_id: int) -> None:
        """Takes a sampled token. What the grammar does not allow is an error."""
        if self._matcher.consume_token(token_id) and token_id in self._eos_token_ids:
            self.has_ended = True

    def allowed(self, token_ids: list[int]) -> int:
        """How many of the tokens could follow in this order, and one more after them: an end is not counted."""
        ends = (place for place, token_id in enumerate(token_ids) if token_id in self._eos_token_ids)
        return self._matcher.validate_tokens(token_ids[: next(ends, len(token_ids))])

    def fill_ahead(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """rows: int32 [len(token_ids) + 1, W]: what may follow now, and after each of the tokens, which are allowed."""
        for row, token_id in zip(rows, token_ids):
            self.fill(row)
            self._matcher.consume_token(token_id)
        self.fill(rows[-1])
        if token_ids:
            self._matcher.rollback(len(token_ids))

    def fill(self, row: np.ndarray) -> None:
        """row: int32 [W], contiguous: bit b of word w becomes 1 where token 32 * w + b may follow."""
        words = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        count = min(len(row), len(words))
        row[:count] = words[:count]
        row[count:] = 0

    def allows_only_the_end(self, row: np.ndarray) -> bool:
        """Of a row that was filled: whether it has no other token than those that end a sequence."""
        ends = sum(
            int(row[token_id // 32]) >> token_id % 32 & 1
            for token_id in self._eos_token_ids
            if token_id < 32 * len(row)
        )
        return int(np.bitwise_count(row.view(np.uint32)).sum()) == ends


def _one_line(message: str) -> str:
    """What is said of the grammar, without the excerpt from it and the matcher's state that may follow."""
    line = " ".join(_EXCERPT.split(message)[0].split())
    if line.startswith("NoExtension"):
        return "no text can match it"
    return line if len(line) <= 300 else line[:297] + "..."
