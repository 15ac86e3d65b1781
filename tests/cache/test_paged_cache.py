from __future__ import annotations

import pytest

from noria.cache.layout import plan_layout
from noria.cache.paged_cache import PagedCache, PrefixHit
from noria.config import SamplingParams
from noria.engine.request import Request

BLOCK_SIZE = 4
CHUNK = 16


def make_request(name: str, token_ids: list[int], cache_salt: str | None = None) -> Request:
    return Request(name, token_ids, SamplingParams(), key=0, cache_salt=cache_salt)


def make_cache(windows: list[int | None], num_blocks: int = 64, caching: bool = True) -> PagedCache:
    return PagedCache(plan_layout(windows), num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)


def compute(cache: PagedCache, request: Request, chunk: int = CHUNK) -> PrefixHit:
    """Admits the request and computes all its tokens, chunk by chunk."""
    hit = cache.lookup(request)
    num_tokens = min(chunk, request.num_tokens - hit.num_tokens)
    assert cache.admit(request, hit, num_tokens, chunk) is not None
    request.num_computed_tokens = hit.num_tokens
    while True:
        request.num_computed_tokens += num_tokens
        cache.commit(request)
        cache.check_integrity()
        if not (num_tokens := min(chunk, request.num_tokens - request.num_computed_tokens)):
            return hit
        assert cache.allocate(request, num_tokens) is not None


def test_admit_returns_the_table_and_allocate_what_is_new() -> None:
    cache = make_cache([None])
    request = make_request("a", list(range(10)))
    first = cache.admit(request, cache.lookup(request), 5, CHUNK)
    assert first is not None
    assert len(first[0]) == 2
    request.num_computed_tokens = 5
    assert cache.allocate(request, 3) == ([],)  # the second block has room for three more
    more = cache.allocate(request, 5)
    assert more is not None
    assert len(more[0]) == 1
    assert cache.block_ids("a") == (first[0] + more[0],)
    assert cache.stats.num_used == 3
    with pytest.raises(RuntimeError, match="has a block table already"):
        cache.admit(request, cache.lookup(request), 5, CHUNK)


def test_allocate_takes_all_or_nothing() -> None:
    cache = make_cache([None, 100], num_blocks=6)  # five usable, two groups
    request = make_request("a", list(range(8)))
    assert cache.admit(request, cache.lookup(request), 8, CHUNK) is not None
    request.num_computed_tokens = 8
    assert cache.allocate(request, 1) is None
    assert cache.stats.num_free == 1
    assert [len(blocks) for blocks in cache.block_ids("a")] == [2, 2]
    cache.check_integrity()
    cache.free(request)
    assert cache.stats.num_free == 5


def test_admit_wants_room_for_the_whole_request() -> None:
    cache = make_cache([None], num_blocks=6)
    request = make_request("a", list(range(21)))  # six blocks
    assert cache.admit(request, cache.lookup(request), 4, CHUNK) is None
    assert cache.stats.num_free == 5
    assert not cache.has_table("a")


def test_second_request_shares_the_prefix() -> None:
    cache = make_cache([None])
    first, second = make_request("a", list(range(14))), make_request("b", [*range(12), 99, 98])
    compute(cache, first)
    hit = compute(cache, second)
    assert hit.num_tokens == 12
    assert cache.block_ids("a")[0][:3] == cache.block_ids("b")[0][:3]
    assert cache.block_ids("a")[0][3] != cache.block_ids("b")[0][3]
    assert cache.stats.num_used == 5
    assert (cache.stats.prefix_queries, cache.stats.prefix_hits) == (28, 12)
    assert cache.stats.hit_rate == 12 / 28
    cache.free(first)
    assert cache.stats.num_used == 4
    cache.free(second)
    assert cache.stats.num_used == 0
    assert cache.stats.num_cached == 3


def test_the_last_token_is_always_computed() -> None:
    cache = make_cache([None])
    compute(cache, make_request("a", list(range(12))))
    assert cache.lookup(make_request("b", list(range(12)))).num_tokens == 8
    assert cache.lookup(make_request("b", list(range(13)))).num_tokens == 12
    assert cache.lookup(make_request("b", [0])).num_tokens == 0


def test_blocks_are_found_only_after_commit() -> None:
    cache = make_cache([None])
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    assert cache.admit(first, cache.lookup(first), 9, CHUNK) is not None
    assert cache.lookup(second).num_tokens == 0
    first.num_computed_tokens = 7
    cache.commit(first)
    assert cache.lookup(second).num_tokens == 4


def test_a_block_waits_for_tokens_that_are_still_being_sampled() -> None:
    cache = make_cache([None])
    request = make_request("a", list(range(7)))
    compute(cache, request)
    assert cache.allocate(request, 1) is not None
    request.num_computed_tokens = 8
    cache.commit(request)
    assert cache.stats.num_cached == 1
    request.token_ids.append(7)
    cache.commit(request)
    assert cache.lookup(make_request("b", list(range(9)))).num_tokens == 8


def test_generated_tokens_are_found_too() -> None:
    cache = make_cache([None])
    request = make_request("a", list(range(6)))
    compute(cache, request)
    request.token_ids += [7, 8, 9]
    assert cache.allocate(request, 3) is not None
    request.num_computed_tokens = 9
    cache.commit(request)
    assert cache.lookup(make_request("b", [0, 1, 2, 3, 4, 5, 7, 8, 1])).num_tokens == 8


def test_salts_do_not_meet() -> None:
    cache = make_cache([None])
    compute(cache, make_request("a", list(range(12)), cache_salt="x"))
    assert cache.lookup(make_request("b", list(range(12)), cache_salt="y")).num_tokens == 0
    assert cache.lookup(make_request("b", list(range(12)))).num_tokens == 0
    assert cache.lookup(make_request("b", list(range(12)), cache_salt="x")).num_tokens == 8


def test_tail_is_evicted_before_head_and_old_before_new() -> None:
    cache = make_cache([None], num_blocks=9)  # eight usable
    old, new = make_request("old", list(range(100, 116))), make_request("new", list(range(16)))
    for request in (old, new):
        compute(cache, request)
    for request in (old, new):
        cache.free(request)
    other = make_request("other", list(range(200, 212)))
    compute(cache, other)  # takes three blocks
    assert cache.lookup(make_request("b", [*range(100, 116), 0])).num_tokens == 4
    assert cache.lookup(make_request("c", [*range(16), 0])).num_tokens == 16


def test_a_hit_makes_its_blocks_recently_used() -> None:
    cache = make_cache([None], num_blocks=9)
    old, new = make_request("old", list(range(100, 116))), make_request("new", list(range(16)))
    for request in (old, new):
        compute(cache, request)
        cache.free(request)
    again = make_request("again", list(range(100, 117)))
    hit = cache.lookup(again)
    assert hit.num_tokens == 16
    assert cache.admit(again, hit, 1, CHUNK) is not None  # one more block, from the tail of "new"
    cache.free(again)
    assert cache.lookup(make_request("c", [*range(16), 0])).num_tokens == 12
    assert cache.lookup(make_request("b", [*range(100, 116), 0])).num_tokens == 16


def test_found_free_blocks_count_as_taken() -> None:
    cache = make_cache([None], num_blocks=6)  # five usable
    done = make_request("done", list(range(16)))
    compute(cache, done)
    cache.free(done)
    other = make_request("other", [50])
    compute(cache, other)
    longer = make_request("longer", list(range(18)))  # four found, one new; one of five is in use
    hit = cache.lookup(longer)
    assert hit.num_tokens == 16
    assert cache.admit(longer, hit, 2, CHUNK) is None
    cache.free(other)
    assert cache.admit(longer, hit, 2, CHUNK) is not None
    cache.check_integrity()


def test_found_blocks_in_use_cost_nothing() -> None:
    cache = make_cache([None], num_blocks=6)
    compute(cache, make_request("a", list(range(16))))
    second = make_request("b", list(range(18)))
    assert cache.admit(second, cache.lookup(second), 2, CHUNK) is not None
    assert cache.stats.num_used == 5


def test_blocks_that_left_the_window_come_back() -> None:
    cache = make_cache([None, 6])
    request = make_request("a", list(range(40)))
    compute(cache, request, chunk=8)
    full, sliding = cache.block_ids("a")
    # The last chunk began at 32 and saw 27, which is in block 6.
    assert 0 not in full
    assert sliding[:6] == [0] * 6
    assert 0 not in sliding[6:]
    assert cache.blocks_held("a") == [10, 4]
    request.token_ids.append(40)
    assert cache.allocate(request, 1) is not None  # 40 sees 35
    assert cache.blocks_held("a") == [11, 3]
    cache.check_integrity()


def test_sliding_hit_leaves_out_what_the_window_passed() -> None:
    cache = make_cache([None, 6])
    compute(cache, make_request("a", list(range(24))), chunk=24)
    second = make_request("b", [*range(20), 77])
    hit = cache.lookup(second)
    assert hit.num_tokens == 20
    assert hit.block_ids[1] == [0, 0, 0, *cache.block_ids("a")[1][3:5]]  # 20 sees 15, in block 3
    assert cache.admit(second, hit, 1, CHUNK) is not None
    assert cache.blocks_held("b") == [6, 3]
    cache.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_a_gemma_like_model_holds_fewer_bytes_than_a_full_one(caching: bool) -> None:
    """15 layers with a window of 512 and 3 full ones, 4096 tokens, blocks of 16 tokens."""

    def most_places_held(windows: list[int | None]) -> int:
        cache = PagedCache(plan_layout(windows), 2048, 16, enable_prefix_caching=caching)
        request, most = make_request("a", list(range(4096))), 0
        assert cache.admit(request, cache.lookup(request), 512, 512) is not None
        for _ in range(8):
            most = max(most, sum(cache.blocks_held("a")))
            request.num_computed_tokens += 512
            cache.commit(request)
            request.token_ids.append(0)
            assert cache.allocate(request, min(512, request.num_tokens - request.num_computed_tokens)) is not None
        most = max(most, sum(cache.blocks_held("a")))
        cache.check_integrity()
        return most * cache.layout.slots  # a block holds one layer's 16 tokens in every slot

    mixed = most_places_held([512, 512, 512, 512, 512, None] * 3)
    full = most_places_held([None] * 18)
    assert full == 18 * 257
    assert mixed <= (257 + 5 * 65) * 3
    assert mixed < 0.4 * full


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    cache = make_cache([None], caching=False)
    request = make_request("a", list(range(12)))
    compute(cache, request)
    assert request.block_hashes == []
    assert cache.lookup(make_request("b", list(range(12)))).num_tokens == 0
    assert (cache.stats.num_cached, cache.stats.prefix_queries, cache.stats.hit_rate) == (0, 0, 0.0)


def test_reset_forgets_and_keeps_requests_of_before_out() -> None:
    cache = make_cache([None])
    request = make_request("a", list(range(9)))
    compute(cache, request)
    cache.reset_prefix_cache()
    assert cache.stats.num_cached == 0
    request.token_ids += [9, 10, 11]
    assert cache.allocate(request, 3) is not None
    request.num_computed_tokens = 12
    cache.commit(request)
    assert cache.lookup(make_request("b", list(range(13)))).num_tokens == 0
    cache.check_integrity()
    cache.free(request)
    compute(cache, make_request("c", list(range(9))))
    assert cache.lookup(make_request("b", list(range(13)))).num_tokens == 8


def test_resumed_requests_are_not_counted_twice() -> None:
    cache = make_cache([None])
    request = make_request("a", list(range(9)))
    compute(cache, request)
    cache.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert compute(cache, request).num_tokens == 8
    assert cache.stats.prefix_queries == 9


def test_integrity_check_sees_a_block_of_two_groups_and_a_lost_one() -> None:
    cache = make_cache([None, 100])
    request = make_request("a", list(range(9)))
    compute(cache, request)
    full, sliding = cache._tables["a"].blocks
    sliding[2], kept = full[2], sliding[2]
    with pytest.raises(RuntimeError, match="used by the groups"):
        cache.check_integrity()
    sliding[2] = 0
    with pytest.raises(RuntimeError, match="lost its place"):
        cache.check_integrity()
    sliding[2] = kept
    cache.check_integrity()
