"""Prompt lookup: what followed the last tokens when they last came up is likely to follow them again.

Saxena, "Prompt Lookup Decoding" (2023). It costs no model, and pays where an answer repeats its prompt or itself:
summaries, edits, code, JSON.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from noria.spec.proposer import DraftRequest

_MOST_CANDIDATES = 16  # earlier places that are compared to find the longest match


class NgramIndex:
    """Where the n-grams of one growing sequence end, for the smallest n; longer matches are found from there."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> its last place
        self._before: list[int] = []  # by place: the place of the same n-gram before; -1 for none

    def extend(self, token_ids: list[int]) -> None:
        """token_ids: what it had before and more."""
        n = self._shortest
        for place in range(len(self._before), len(token_ids)):
            ngram = tuple(token_ids[place + 1 - n : place + 1]) if place >= n - 1 else ()
            self._before.append(self._last.get(ngram, -1))
            if ngram:
                self._last[ngram] = place

    def continued(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens that follow the longest match of the end of the sequence, of equals the most recent; []
        without any. A match that reaches the end goes on into its own continuation: a loop goes on."""
        place = self._longest_match(token_ids)
        if place < 0:
            return []
        period = len(token_ids) - 1 - place
        return [token_ids[place + 1 + index % period] for index in range(count)]

    def _longest_match(self, token_ids: list[int]) -> int:
        """The place of its last token; -1 for none."""
        end = len(token_ids) - 1
        best, best_length = -1, self._shortest - 1
        place = self._before[end]
        for _ in range(_MOST_CANDIDATES):
            if place < 0 or best_length == self._longest:
                break
            length = self._shortest
            while length < self._longest and length <= place and token_ids[place - length] == token_ids[end - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        return best


class NgramProposer:
    """On the host: it needs the tokens and nothing else."""

    def __init__(self, shortest: int, longest: int) -> None:
        """shortest, longest: of the matches, in tokens."""
        self._sizes = shortest, longest
        self._indices: dict[Hashable, NgramIndex] = {}

    def may_propose(self, request: DraftRequest) -> bool:
        return bool(self._continued(request, 1))

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._continued(request, request.num_drafts) for request in requests]

    def forget(self, key: Hashable) -> None:
        self._indices.pop(key, None)

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        self._indices.clear()

    def _continued(self, request: DraftRequest, count: int) -> list[int]:
        index = self._indices.get(request.key)
        if index is None:
            index = self._indices[request.key] = NgramIndex(*self._sizes)
        index.extend(request.token_ids)
        return index.continued(request.token_ids, count)
