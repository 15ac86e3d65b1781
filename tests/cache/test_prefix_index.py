from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.cache.layout import plan_layout
from noria.cache.prefix_index import PrefixIndex, block_hash, extend_hashes
from noria.config import SamplingParams
from noria.engine.request import Request

BLOCK_SIZE = 4


def request(token_ids: list[int], cache_salt: str | None = None) -> Request:
    return Request("r", token_ids, SamplingParams(), key=0, cache_salt=cache_salt)


def test_hash_is_the_same_in_every_process() -> None:
    program = (
        "from noria.cache.prefix_index import block_hash;"
        "print(block_hash(block_hash(None, [1, 2]), [3, -4], ['tenant', 7, b'x']).hex())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert outputs == {block_hash(block_hash(None, [1, 2]), [3, -4], ["tenant", 7, b"x"]).hex()}


def test_hash_tells_everything_apart() -> None:
    parent = block_hash(None, [1])
    hashes = [
        block_hash(None, [1, 2]),
        block_hash(None, [2, 1]),
        block_hash(None, [1]),
        block_hash(None, [258]),
        block_hash(parent, [1, 2]),
        block_hash(None, [1, 2], [""]),
        block_hash(None, [1, 2], ["a", "b"]),
        block_hash(None, [1, 2], ["ab"]),
        block_hash(None, [1, 2], [b"ab"]),
        block_hash(None, [1, 2], [1]),
        block_hash(None, [1, 2], ["1"]),
        block_hash(None, [1, 2], [12]),
        block_hash(None, [1, 2], [1, 2]),
    ]
    assert len(set(hashes)) == len(hashes)


def test_hashes_chain_and_grow_with_the_tokens() -> None:
    long, other = request(list(range(11))), request([0, 1, 2, 9, 4, 5, 6, 7])
    assert len(extend_hashes(long, BLOCK_SIZE)) == 2
    assert extend_hashes(long, BLOCK_SIZE)[1] != extend_hashes(other, BLOCK_SIZE)[1]
    before = list(long.block_hashes)
    long.token_ids.append(11)
    assert extend_hashes(long, BLOCK_SIZE) == [*before, block_hash(before[1], [8, 9, 10, 11])]


def test_salt_separates_all_blocks() -> None:
    plain, salted, empty = (extend_hashes(request(list(range(8)), salt), BLOCK_SIZE) for salt in (None, "tenant", ""))
    assert len({*plain, *salted, *empty}) == 6


def filled(windows: list[int | None], hashes: list[bytes]) -> tuple[PrefixIndex, list[list[int]]]:
    """An index that has every hash for every group, and its block ids [group][hash]."""
    index = PrefixIndex(plan_layout(windows), BLOCK_SIZE)
    ids = [[1 + g * len(hashes) + i for i in range(len(hashes))] for g in range(len(windows))]
    for group, blocks in enumerate(ids):
        for digest, block in zip(hashes, blocks):
            index.add(group, digest, block)
    return index, ids


HASHES = extend_hashes(request(list(range(10 * BLOCK_SIZE))), BLOCK_SIZE)


def test_full_group_needs_every_block() -> None:
    index, (ids,) = filled([None], HASHES)
    assert index.find(HASHES) == (ids,)
    index.discard(ids[6])
    assert index.find(HASHES) == (ids[:6],)
    index.discard(ids[0])
    assert index.find(HASHES) == ([],)


def test_sliding_group_needs_only_the_window_of_the_next_token() -> None:
    index, (ids,) = filled([9], HASHES)  # the token at 40 sees 32 .. 39
    assert index.find(HASHES) == ([0] * 8 + ids[8:],)
    for block in ids[:8]:
        index.discard(block)
    assert index.find(HASHES) == ([0] * 8 + ids[8:],)
    index.discard(ids[9])  # 36 sees 28 .. 35, and block 7 is gone; so is everything before
    assert index.find(HASHES) == ([],)


def test_window_edge() -> None:
    index, (ids,) = filled([10], HASHES)  # the token at 40 sees 31, the last of block 7
    index.discard(ids[7])
    assert index.find(HASHES) == ([0] * 4 + ids[4:7],)  # the token at 28 sees 19 .. 27: blocks 4 to 6


def test_the_longest_prefix_that_all_groups_can_serve() -> None:
    index, (full, sliding) = filled([None, 9], HASHES)
    index.discard(full[8])
    assert index.find(HASHES) == (full[:8], [0] * 6 + sliding[6:8])
    index.discard(sliding[7])
    assert index.find(HASHES) == (full[:7], [0] * 5 + sliding[5:7])


def test_the_first_of_equal_blocks_stays() -> None:
    index = PrefixIndex(plan_layout([None]), BLOCK_SIZE)
    index.add(0, HASHES[0], 5)
    index.add(0, HASHES[0], 6)
    assert index.find(HASHES[:1]) == ([5],)
    assert 6 not in index
    index.discard(6)
    assert 5 in index
    index.check_integrity({5: 0})
    with pytest.raises(RuntimeError, match="block 5 is used by group 1"):
        index.check_integrity({5: 1})


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 4, 5, 9, 13]), min_size=1, max_size=3, unique=True),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=14),
)
def test_against_trying_every_length(windows: list[int | None], missing: set[tuple[int, int]]) -> None:
    index, ids = filled(windows, HASHES)
    for group, i in missing:
        if group < len(windows):
            index.discard(ids[group][i])

    def served(length: int) -> bool:
        position = length * BLOCK_SIZE
        return all(
            (group, past // BLOCK_SIZE) not in missing
            for group, window in enumerate(windows)
            for past in range(0 if window is None else max(0, position - window + 1), position)
        )

    assert len(index.find(HASHES)[0]) == max(filter(served, range(len(HASHES) + 1)))
