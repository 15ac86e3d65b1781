from __future__ import annotations

import pytest

from noria.cache.block_pool import NULL_BLOCK, BlockPool


def test_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_used == 4
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)


def test_blocks_with_content_are_reused_last_and_in_the_order_of_release() -> None:
    pool = BlockPool(7)
    first = pool.allocate(6)
    for block in (3, 1, 5):
        pool.release(block, keep_content=True)
    for block in (2, 4):
        pool.release(block, keep_content=False)
    assert sorted(first) == [1, 2, 3, 4, 5, 6]
    assert sorted(pool.allocate(2)) == [2, 4]
    assert pool.allocate(3) == [3, 1, 5]


def test_sharing_counts_references() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block, keep_content=True)
    assert not pool.is_free(block)
    pool.release(block, keep_content=True)
    assert pool.is_free(block)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(block, keep_content=True)


def test_a_free_block_is_taken_out_of_the_queue_when_shared() -> None:
    pool = BlockPool(4)
    block, *_ = pool.allocate(3)
    pool.release(block, keep_content=True)
    pool.share(block)
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="0 free"):
        pool.allocate(1)


def test_integrity_check_sees_wrong_counts() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(2)
    references = [int(block in taken) for block in range(4)]
    pool.check_integrity(references)
    references[taken[0]] = 2
    with pytest.raises(RuntimeError, match="counts 1 references, the tables hold 2"):
        pool.check_integrity(references)
    pool._free[NULL_BLOCK] = None
    with pytest.raises(RuntimeError, match="block 0 has 0 references and is in the free list"):
        pool.check_integrity([int(block in taken) for block in range(4)])


def test_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)
