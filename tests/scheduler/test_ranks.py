"""Ranks: who goes where, and that each has its own rows, budget, blocks and prefixes."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_runner import expected_tokens
from scheduler_loop import Loop

from noria.engine.request import Request, RequestStatus

A, B, C = (range(start, start + 24) for start in (0, 100, 200))  # prompts without a common prefix


def ranks_of(requests: list[Request]) -> list[int]:
    return [request.rank for request in requests]


def test_equal_work_goes_round() -> None:
    loop = Loop(num_ranks=4, max_num_seqs=8, budget=64)
    requests = [loop.add(str(index), range(40 * index, 40 * index + 6)) for index in range(8)]
    loop.step()
    assert Counter(ranks_of(requests)) == {0: 2, 1: 2, 2: 2, 3: 2}
    loop.finish()
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 4)


def test_a_request_goes_where_the_least_work_is() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=8, budget=128)
    requests = [
        loop.add("long", range(30)),
        loop.add("short", range(100, 105)),
        loop.add("too", range(200, 205)),
        loop.add("three", range(300, 305)),
    ]
    loop.step()
    assert ranks_of(requests) == [0, 1, 1, 1]


def test_a_request_goes_where_its_prefix_is() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=4, budget=128, num_blocks=64)
    first = [loop.add("a", A), loop.add("b", B)]
    loop.finish()
    assert ranks_of(first) == [0, 1]
    again = [loop.add("b2", [*B, 1]), loop.add("a2", [*A, 1])]
    loop.step()
    assert ranks_of(again) == [1, 0]
    assert [request.num_cached_tokens for request in again] == [24, 24]
    loop.finish()


def test_but_not_to_a_rank_with_more_to_do_than_the_prefix_saves() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=8, budget=256, num_blocks=64)
    loop.add("a", A[:4])
    loop.finish()
    loop.add("busy", [*A[:4], *C], max_tokens=20)  # where the prefix is
    loop.step()
    other = loop.add("other", [*A[:4], 1, 2, 3])
    loop.step()
    assert (other.rank, other.num_cached_tokens) == (1, 0)
    loop.finish()


def test_a_prefix_is_not_found_on_another_rank() -> None:
    """The only row of its rank is taken, so the request computes its prefix again."""
    loop = Loop(num_ranks=2, max_num_seqs=2, budget=128)
    holder = loop.add("holder", A, max_tokens=12)
    loop.step()
    other = loop.add("other", [*A, 1])
    loop.step()
    assert (holder.rank, other.rank, other.num_cached_tokens) == (0, 1, 0)
    loop.finish()
    assert other.output_token_ids == expected_tokens(other.prompt_token_ids, 4)


def test_every_rank_has_its_share_of_the_budget() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=4, budget=16)
    loop.add("a", A), loop.add("b", B)
    assert loop.step().num_scheduled_tokens == {"a": 8, "b": 8}
    loop.add("c", C)  # no rank has budget left beside the prompts that it computes
    assert loop.step().num_scheduled_tokens == {"a": 8, "b": 8}
    assert loop.step().num_scheduled_tokens == {"a": 8, "b": 8}
    assert loop.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 7}
    loop.finish()


def test_one_long_request_has_no_more_than_the_budget_of_its_rank() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=4, budget=16)
    request = loop.add("a", A)
    assert [loop.step().num_scheduled_tokens["a"] for _ in range(4)] == [8, 8, 8, 1]
    loop.finish()
    assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 4)


def test_who_is_preempted_is_the_last_of_its_rank() -> None:
    """Rank 0 runs out of blocks; the last to come is on rank 1, where there is room."""
    loop = Loop(num_ranks=2, max_num_seqs=6, budget=128, num_blocks=17, max_model_len=60)
    a, b, c, d = (loop.add(name, range(100 * index, 100 * index + 28), 30) for index, name in enumerate("abcd"))
    loop.step()
    assert ranks_of([a, b, c, d]) == [0, 1, 0, 1]
    loop.scheduler.abort(["b"])
    while c.status is RequestStatus.RUNNING and d.status is RequestStatus.RUNNING:
        loop.step()
    assert (c.num_preemptions, d.num_preemptions) == (1, 0)
    loop.finish()
    for request in (a, c, d):
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 30)


@pytest.mark.parametrize("prompts", [[A], [A, B[:3], C[:11]]], ids=["one", "three unequal"])
@pytest.mark.parametrize("burst", [1, 4])
def test_idle_ranks_stop_nobody(prompts: list[range], burst: int) -> None:
    loop = Loop(num_ranks=4, max_num_seqs=8, budget=32, num_scheduler_steps=burst)
    requests = [loop.add(str(index), prompt, 9) for index, prompt in enumerate(prompts)]
    loop.finish()
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 9)


def test_a_burst_is_as_long_as_the_fullest_rank_has_room_for() -> None:
    """Two requests on each rank, for whose next 4 tokens there are blocks. When rank 1 has one of them left, rank 0
    still has two."""
    loop = Loop(num_ranks=2, max_num_seqs=4, budget=128, num_blocks=17, num_scheduler_steps=16, max_model_len=60)
    requests = [loop.add(str(index), range(100 * index, 100 * index + 26), 20) for index in range(4)]
    loop.step()
    assert ranks_of(requests) == [0, 1, 0, 1]
    loop.scheduler.abort(["1"])
    assert loop.step().num_steps == 4
    loop.scheduler.abort(["0"])
    assert loop.step().num_steps > 4
    loop.finish()
    for request in requests[2:]:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 20)


def test_statistics_are_of_all_ranks() -> None:
    loop = Loop(num_ranks=2, max_num_seqs=4, budget=128, num_blocks=32)
    loop.add("a", A), loop.add("b", B)
    loop.finish()
    stats = loop.scheduler.stats.cache
    assert (stats.num_blocks, stats.num_free, stats.num_cached, stats.prefix_queries) == (62, 62, 12, 48)
    loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.stats.cache.num_cached == 0
