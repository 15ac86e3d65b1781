"""Prompt lookup against a plain search, and how many drafts a sequence gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import SamplingParams
from noria.spec.ngram import NgramIndex, NgramProposer
from noria.spec.proposer import DraftLength, DraftRequest

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def searched(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The longest n-gram of the end that came before, where it came last, and what followed it."""
    for size in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[-size:]:
                tokens = list(token_ids)
                for place in range(end, end + count):
                    tokens.append(tokens[place])
                return tokens[len(token_ids) :]
    return []


@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 8), st.integers(1, 5))
def test_the_longest_and_then_the_most_recent_match(
    token_ids: list[int], shortest: int, more: int, count: int, chunk: int
) -> None:
    """Up to 16 places are compared, and these sequences are so short that they may have more."""
    index = NgramIndex(shortest, shortest + more)
    for end in range(1, len(token_ids) + 1, chunk):
        index.extend(token_ids[:end])
    index.extend(token_ids)
    found, best = index.continued(token_ids, count), searched(token_ids, shortest, shortest + more, count)
    assert bool(found) == bool(best)
    if len(token_ids) <= 16:
        assert found == best


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),  # the most recent
        ([7, 1, 2, 3, 9, 5, 1, 2, 3, 8, 7, 1, 2, 3], [9, 5, 1, 2]),  # the longest
        ([5, 5, 5, 5], [5, 5, 5, 5]),  # a loop goes on
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1, 2], []),
    ],
)
def test_examples(token_ids: list[int], expected: list[int]) -> None:
    index = NgramIndex(3, 4)
    index.extend(token_ids)
    assert index.continued(token_ids, 4) == expected


def request(key: str, token_ids: list[int], count: int = 2) -> DraftRequest:
    return DraftRequest(key, "", token_ids, count, SamplingParams(), 0)


def test_each_sequence_has_an_index_of_its_own() -> None:
    proposer = NgramProposer(2, 3)
    one, other = [1, 2, 3, 1, 2], [1, 2, 9, 1, 2]
    assert proposer.propose([request("a", one), request("b", other, 1)]) == [[3, 1], [9]]
    assert not proposer.may_propose(request("c", [1, 2]))
    assert proposer.may_propose(request("a", one))
    proposer.forget("a")
    proposer.forget("never seen")
    assert proposer.propose([request("a", other)]) == [[9, 1]]  # the id is another sequence's now


def test_drafts_grow_while_they_are_right_and_pause_when_they_are_wrong() -> None:
    length = DraftLength(7)
    assert length.wanted(10) == 3
    length.observe(3, 3, 14)
    assert length.wanted(14) == 6
    length.observe(6, 6, 21)
    assert length.wanted(21) == 7
    length.observe(7, 2, 24)
    assert length.wanted(24) == 2
    pauses, num_tokens = [], 24
    for _ in range(8):
        length.observe(2, 0, num_tokens)
        pause = next(count for count in range(1000) if length.wanted(num_tokens + count))
        pauses.append(pause)
        num_tokens += pause
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    length.observe(1, 1, num_tokens)  # a first success forgets the failures
    length.observe(2, 0, num_tokens)
    assert not length.wanted(num_tokens + 1)
    assert length.wanted(num_tokens + 2) == 1


def test_drafts_that_were_cut_say_nothing_of_longer_ones() -> None:
    length = DraftLength(8)
    length.observe(3, 3, 5)
    assert length.wanted(5) == 6
    length.observe(1, 1, 7)  # there was room for one only
    assert length.wanted(7) == 6
    assert DraftLength(2).wanted(0) == 2
