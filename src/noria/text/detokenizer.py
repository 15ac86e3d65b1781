"""Incremental detokenization: token ids in, whole characters out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from noria.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the generated ids of one sequence into text, piece by piece.

    The pieces and `finish()` together are `tokenizer.decode(ids, continuation=True)`, however the ids were cut: a
    token's bytes do not depend on its neighbours, and the only state is an unfinished UTF-8 character. The text
    continues the prompt, so a leading space stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character wait for the next call."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decoder.decode(b"".join(token_bytes(i) for i in token_ids if i not in skipped))

    def finish(self) -> str:
        """What is left when no more ids come: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)
