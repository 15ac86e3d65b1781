"""A tokenizer as llguidance wants it: the bytes of every token, which ones are special, and how text is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer

from noria.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """The interface that LLTokenizer takes; its names are llguidance's."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids that spell the text, no special ones among them: as the model's tokenizer writes it, if that does.

        It may put a space before the text, or read a special token in it.
        """
        spelled = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(spelled.decode("utf-8", errors="ignore"), add_special_tokens=False)
        is_same = b"".join(self.tokens[token_id] for token_id in ids) == spelled
        if is_same and self._tokenizer.special_ids.isdisjoint(ids):
            return ids
        return self._spell(spelled)

    def _spell(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again; [] when a byte has none."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_bytes), None)
            if end is None:
                return []
            ids.append(self._by_bytes[text[start:end]])
            start = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = self._tokenizer.special_ids
        pairs = [(piece, token_id) for token_id, piece in enumerate(self.tokens) if piece and token_id not in special]
        return dict(reversed(pairs))  # of tokens that are alike, the first

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)


def grammar_tokenizer(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """eos_token_ids: what may come when a grammar is complete; at least one. Takes 0.1 to 2 seconds."""
    return LLTokenizer(GrammarVocabulary(tokenizer, eos_token_ids[0]), eos_token=list(eos_token_ids))  # pyright: ignore[reportArgumentType]
