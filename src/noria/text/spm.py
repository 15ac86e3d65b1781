"""SentencePiece BPE from a list of pieces with scores, as Llama 2 and Gemma use it.

Source: Kudo and Richardson, SentencePiece, 2018, and its bpe_model.cc: starting from single characters, the adjacent
pair whose union is the piece with the highest score is merged, the leftmost on a tie, until no union is a piece. A
character that is no piece becomes its UTF-8 bytes (byte fallback). Our own rather than a model of the `tokenizers`
package, because that one wants an ordered list of merges: deriving it from the scores of 262144 pieces takes seconds.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

SPACE = "\u2581"  # ▁, how a space is written in the pieces
_CACHED_WORD = 32  # characters; longer runs without a space rarely come twice


class SentencePieceBPE:
    """pieces: text -> id of everything a merge may form. scores: id -> score. byte_ids: byte -> id, for fallback."""

    def __init__(
        self,
        pieces: Mapping[str, int],
        scores: list[float],
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
    ) -> None:
        self._pieces, self._scores = pieces, scores
        self._byte_ids, self._unknown_id = byte_ids, unknown_id
        self._words = _word_pattern(pieces)
        self._encode_cached = lru_cache(maxsize=1 << 15)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose spaces are already written as ▁."""
        ids: list[int] = []
        for word in self._words.findall(text):
            ids.extend(self._encode_cached(word) if len(word) <= _CACHED_WORD else self._merge(word))
        return ids

    def _merge(self, word: str) -> tuple[int, ...]:
        symbols = list(word)  # "" once merged into its left neighbour
        following = [*range(1, len(word)), -1]
        preceding = [*range(-1, len(word) - 1)]
        queue: list[tuple[float, int, int, str]] = []  # (-score, left, right, union)

        def consider(left: int, right: int) -> None:
            union = symbols[left] + symbols[right]
            if (piece := self._pieces.get(union)) is not None:
                heapq.heappush(queue, (-self._scores[piece], left, right, union))

        for left in range(len(word) - 1):
            consider(left, left + 1)
        while queue:
            _, left, right, union = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != union:
                continue  # one of the two was merged with another neighbour since
            symbols[left], symbols[right] = union, ""
            following[left] = after = following[right]
            if after >= 0:
                preceding[after] = left
                consider(left, after)
            if preceding[left] >= 0:
                consider(preceding[left], left)
        return tuple(self._ids(symbol for symbol in symbols if symbol))

    def _ids(self, symbols: Iterable[str]) -> Iterator[int]:
        for symbol in symbols:
            if (piece := self._pieces.get(symbol)) is not None:
                yield piece
                continue
            encoded = symbol.encode("utf-8")
            if all(byte in self._byte_ids for byte in encoded):
                yield from (self._byte_ids[byte] for byte in encoded)
            elif self._unknown_id is not None:
                yield self._unknown_id


def _word_pattern(pieces: Mapping[str, int]) -> re.Pattern[str]:
    """Cuts a text before each ▁ that no piece holds together with the character before it.

    No merge can cross such a cut, so words can be encoded one by one (and looked up) without changing the result.
    """
    joined = "\0".join(pieces)
    before = set(re.findall(f"[^\0](?={SPACE})", joined))
    bound = "".join(map(re.escape, sorted(before)))
    inner = f"(?:[^{SPACE}]|(?<=[{bound}]){SPACE})" if bound else f"[^{SPACE}]"
    return re.compile(f".{inner}*", re.DOTALL)
