"""Room for drafts before they are made, and blocks whose content depends on the token behind them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from noria.cache.layout import plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import Request
from noria.scheduler.plan import cut_counts
from noria.scheduler.schedule import Schedule, StepResult
from noria.scheduler.scheduler import Scheduler

BLOCK = 4


def cache_of(num_blocks: int, lookahead: int = 1) -> PagedCache:
    return PagedCache(plan_layout((None,)), num_blocks, BLOCK, lookahead=lookahead)


def scheduler_of(cache: PagedCache, most_rows: int = 8) -> Scheduler:
    return Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, rows_with_drafts=most_rows)


def request(name: str, prompt: Sequence[int], max_tokens: int = 16) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0)


def step(scheduler: Scheduler, token: int, drafts: dict[str, list[int]] | None = None, right: int = 0) -> Schedule:
    """In which `right` of the drafts are, and `token` follows."""
    schedule = scheduler.schedule(drafts or {})
    tokens = {name: [*schedule.draft_token_ids.get(name, [])[:right], token] for name in schedule.num_scheduled_tokens}
    scheduler.update(schedule, StepResult(tokens))
    scheduler.check_integrity()
    return schedule


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        ({"a": 3, "b": 4}, 9, {"a": 3, "b": 4}),
        ({"a": 3, "b": 4}, 5, {"a": 3, "b": 2}),
        ({"a": 3, "b": 4}, 3, {"a": 3}),
        ({"a": 3}, 0, {}),
        ({"a": 3}, -2, {}),
        ({}, 3, {}),
    ],
)
def test_counts_are_cut(wanted: dict[str, int], most: int, expected: dict[str, int]) -> None:
    assert cut_counts(wanted, most) == expected


def test_the_step_after_finds_the_reserved_blocks() -> None:
    scheduler = scheduler_of(cache := cache_of(16))
    scheduler.add(request("a", range(3)))
    step(scheduler, 7)
    reserved = scheduler.reserve({"a": 5})
    assert list(reserved) == ["a"]
    count, (blocks,) = reserved["a"]
    assert (count, len(blocks)) == (5, 2)  # token 3 and 5 drafts: positions to 8
    schedule = step(scheduler, 7, {"a": [1, 2, 3, 4, 5]}, right=2)
    assert schedule.cached_requests[0].new_block_ids == ([],)
    assert cache.block_ids("a")[0][1:] == blocks


def test_what_is_not_used_is_kept_for_later() -> None:
    scheduler = scheduler_of(cache_of(16))
    scheduler.add(request("a", range(3)))
    step(scheduler, 7)
    scheduler.reserve({"a": 5})
    used = scheduler.stats.cache.num_used
    for _ in range(5):
        step(scheduler, 7)
    assert scheduler.stats.cache.num_used == used
    scheduler.abort(["a"])
    scheduler.check_integrity()


def test_nobody_loses_blocks_for_drafts() -> None:
    scheduler = scheduler_of(cache_of(1 + 8))
    for name in "ab":
        scheduler.add(request(name, [ord(name) + i for i in range(15)]))
    step(scheduler, 7)
    assert scheduler.stats.cache.num_free == 0
    assert scheduler.reserve({"a": 3, "b": 3}) == {}
    assert scheduler.reserve({}) == {}


def test_as_many_as_there_are_rows_for() -> None:
    scheduler = scheduler_of(cache_of(32), most_rows=6)
    for name in "abc":
        scheduler.add(request(name, [ord(name)]))
    step(scheduler, 7)
    found = scheduler.reserve({"a": 2, "b": 2, "c": 2})
    assert {name: count for name, (count, _) in found.items()} == {"a": 2, "b": 1}


def test_every_rank_reserves_in_its_own_rows_and_blocks() -> None:
    caches = [cache_of(32), cache_of(32)]
    scheduler = Scheduler(caches, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, rows_with_drafts=5)
    requests = [request(name, [ord(name)] * length) for name, length in (("a", 7), ("b", 6), ("c", 5), ("d", 7))]
    for each in requests:
        scheduler.add(each)
    step(scheduler, 7)
    rank = {each.request_id: each.rank for each in requests}
    assert sorted(rank.values()) == [0, 0, 1, 1]
    before = [cache.stats.num_used for cache in caches]
    found = scheduler.reserve({"a": 2, "b": 2, "c": 2, "d": 2})
    counts = {name: count for name, (count, _) in found.items()}
    assert sum(counts.values()) == 6  # of each rank 5 rows without the two that decode
    for index, cache in enumerate(caches):
        own = [name for name in counts if rank[name] == index]
        assert sum(counts[name] for name in own) == 3
        taken = sum(len(blocks) for name in own for blocks in found[name][1])
        assert cache.stats.num_used - before[index] == taken
    scheduler.check_integrity()


def hit(cache: PagedCache, tokens: Sequence[int]) -> int:
    return cache.lookup(request("x", tokens)).num_tokens


@pytest.mark.parametrize(("lookahead", "other"), [(0, 8), (1, 4)])
def test_a_block_belongs_to_those_who_go_on_alike(lookahead: int, other: int) -> None:
    scheduler = scheduler_of(cache := cache_of(32, lookahead))
    scheduler.add(request("a", range(8)))
    step(scheduler, 50)
    assert hit(cache, [*range(8), 50]) == 8  # known as soon as the token behind it is
    assert hit(cache, [*range(8), 51]) == other
    assert hit(cache, range(8)) == 4


def test_what_wrong_drafts_computed_is_not_found() -> None:
    scheduler = scheduler_of(cache := cache_of(32))
    scheduler.add(request("a", range(6)))
    step(scheduler, 50)
    scheduler.reserve({"a": 3})
    step(scheduler, 60, {"a": [51, 52, 53]}, right=1)  # 50, 51, 60
    known = [*range(6), 50, 51, 60]
    assert hit(cache, [*known, 1]) == 8
    assert hit(cache, [*range(6), 50, 51, 52, 53]) == 4


def test_a_request_that_ends_leaves_its_last_full_block() -> None:
    scheduler = scheduler_of(cache := cache_of(32))
    scheduler.add(request("a", range(6), max_tokens=3))
    for token in (50, 51, 52):
        step(scheduler, token)
    assert not scheduler.has_unfinished
    assert hit(cache, [*range(6), 50, 51, 52, 1]) == 8
