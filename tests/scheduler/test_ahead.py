"""Rules of running ahead: a step is planned while the one before it is not reported yet."""

from __future__ import annotations

import pytest
from fake_runner import expected_tokens
from scheduler_loop import Loop

from noria.engine.request import FinishReason, RequestStatus
from noria.scheduler.schedule import Schedule


def test_the_next_step_uses_a_token_that_is_still_being_sampled() -> None:
    loop = Loop()
    request = loop.add("a", [1, 2, 3], max_tokens=3)
    assert loop.begin().num_scheduled_tokens == {"a": 3}
    second = loop.begin()
    assert second.num_scheduled_tokens == {"a": 1}
    assert second.cached_requests[0].num_computed_tokens == 3
    assert request.num_output_tokens == 0
    right = expected_tokens([1, 2, 3], 3)
    assert loop.end() == [("a", right[:1])]
    assert loop.begin().num_scheduled_tokens == {"a": 1}
    assert loop.end() == [("a", right[1:2])]
    assert loop.begin() == Schedule()
    assert loop.end() == [("a", right[2:])]
    assert not loop.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "steps"),
    [(3, 1, 1), (3, 2, 2), (7, None, 1), (7, 5, 1), (6, None, 2), (5, 2, 2)],
)
def test_nothing_is_computed_beyond_the_last_needed_token(
    prompt_tokens: int, max_tokens: int | None, steps: int
) -> None:
    """Eight tokens at most: the last one is sampled in a step that is known beforehand."""
    loop = Loop(max_model_len=8)
    request = loop.add("a", range(prompt_tokens), max_tokens=max_tokens)
    for step in range(steps):
        assert loop.begin().num_scheduled_tokens == {"a": prompt_tokens if step == 0 else 1}
        if step:
            loop.end()
    assert loop.begin() == Schedule()
    assert loop.scheduler.has_unfinished
    loop.end()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == steps
    assert request.num_computed_tokens == prompt_tokens + steps - 1


def test_who_waits_for_his_last_token_holds_up_nobody() -> None:
    loop = Loop(max_num_seqs=2)
    loop.add("a", [1, 2], max_tokens=1)
    loop.add("b", [3], max_tokens=5)
    late = loop.add("late", [4, 5], max_tokens=5)
    loop.begin()
    assert loop.begin().num_scheduled_tokens == {"b": 1}  # "a" still has its place
    loop.end()
    assert loop.begin().num_scheduled_tokens == {"b": 1, "late": 2}
    assert late.status is RequestStatus.RUNNING


def test_what_a_stop_token_makes_useless_is_dropped() -> None:
    right = expected_tokens(list(range(7)), 3)
    loop = Loop()
    request = loop.add("a", range(7), max_tokens=9, stops=right[1:2])
    other = loop.add("b", [30], max_tokens=4)
    loop.begin()
    loop.begin()
    assert ("a", right[:1]) in loop.end()
    assert loop.begin().num_scheduled_tokens == {"a": 1, "b": 1}
    assert ("a", right[1:2]) in loop.end()
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, right[1])
    assert not loop.cache.has_table("a")
    again = loop.begin()  # the step with the extra token of "a" is still in flight
    assert (again.num_scheduled_tokens, again.finished_ids) == ({"b": 1}, ("a",))
    assert [name for name, _ in loop.end()] == ["b"]
    assert request.output_token_ids == right[:2]
    loop.end()
    assert other.is_finished
    assert loop.cache.stats.num_free == loop.cache.num_usable_blocks


def test_blocks_of_a_request_that_stopped_go_to_the_next_at_once() -> None:
    """Its extra token is written before the blocks' new owner writes, so it may use them in the very next step."""
    right = expected_tokens(list(range(13)), 1)
    loop = Loop(num_blocks=9, budget=32, max_model_len=32)
    loop.add("a", range(13), max_tokens=9, stops=right)
    late = loop.add("late", range(20, 50), max_tokens=2)  # all eight blocks
    loop.begin()
    assert loop.begin().num_scheduled_tokens == {"a": 1}
    loop.end()
    assert loop.begin().num_scheduled_tokens == {"late": 30}
    assert loop.end() == []
    assert loop.begin().num_scheduled_tokens == {"late": 1}
    loop.end()
    loop.end()
    assert late.output_token_ids == expected_tokens(list(range(20, 50)), 2)


def preempted_in_flight(max_tokens: int, stops: tuple[int, ...] = ()) -> Loop:
    """Two steps in flight: the first samples for "last", the second was planned when it had just been preempted."""
    loop = Loop(num_blocks=9, budget=32, max_model_len=32)
    loop.add("first", range(14), max_tokens=8)
    loop.add("last", range(20, 34), max_tokens=max_tokens, stops=stops)
    loop.step()
    loop.step()
    loop.begin()  # both compute their 16th token, which fills all blocks
    schedule = loop.begin()
    assert schedule.preempted_ids == ("last",)
    assert schedule.num_scheduled_tokens == {"first": 1}
    return loop


def test_who_is_preempted_while_in_flight_keeps_the_token() -> None:
    loop = preempted_in_flight(max_tokens=8)
    right = expected_tokens(list(range(20, 34)), 8)
    assert loop.end()[1] == ("last", right[2:3])
    (request,) = loop.scheduler._waiting
    assert request.output_token_ids == right[:3]
    loop.end()
    schedules = loop.finish()
    resumed = next(c for s in schedules for c in s.cached_requests if c.resumed)
    assert resumed.token_ids == [*range(20, 34), *right[:3]]
    assert request.output_token_ids == right


@pytest.mark.parametrize("stop", [False, True])
def test_a_preempted_request_can_finish_with_the_token_it_kept(stop: bool) -> None:
    right = expected_tokens(list(range(20, 34)), 3)
    assert right[2] not in right[:2]
    loop = preempted_in_flight(max_tokens=8 if stop else 3, stops=(right[2],) if stop else ())
    assert loop.end()[1] == ("last", right[2:])
    assert loop.scheduler.num_waiting == 0
    loop.end()
    schedules = loop.finish()
    assert schedules[0].finished_ids == ("last",)
    assert not any("last" in s.num_scheduled_tokens for s in schedules)


def preempted_in_an_empty_step() -> Loop:
    """ "first" waits for its last token and holds three blocks, so that "last" finds no room for its 21st token."""
    loop = Loop(num_blocks=9, budget=64, max_model_len=32)
    loop.add("first", range(9), max_tokens=2)
    loop.add("last", range(20, 39), max_tokens=8)
    loop.step()
    assert loop.begin().num_scheduled_tokens == {"first": 1, "last": 1}
    assert loop.begin() == Schedule()
    assert loop.scheduler.stats.num_preemptions == 1
    return loop


def test_a_preemption_is_told_with_the_next_tokens() -> None:
    loop = preempted_in_an_empty_step()
    with pytest.raises(RuntimeError, match="before the oldest step was reported"):
        loop.scheduler.schedule()
    assert [name for name, _ in loop.end()] == ["first", "last"]
    schedule = loop.begin()
    assert (schedule.finished_ids, schedule.preempted_ids) == (("first",), ("last",))
    (resumed,) = schedule.cached_requests
    assert resumed.resumed
    assert resumed.token_ids == [*range(20, 39), *expected_tokens(list(range(20, 39)), 2)]
    loop.end()
    loop.finish()


def test_a_preemption_is_not_told_of_a_request_that_has_ended() -> None:
    loop = preempted_in_an_empty_step()
    loop.scheduler.abort(["last"])
    again = loop.add("last", [1, 2], max_tokens=2)
    assert [name for name, _ in loop.end()] == ["first"]
    schedule = loop.begin()
    assert sorted(schedule.finished_ids) == ["first", "last"]
    assert schedule.preempted_ids == ()
    loop.end()
    loop.finish()
    assert again.output_token_ids == expected_tokens([1, 2], 2)


@pytest.mark.parametrize("reported", [0, 1])
def test_abort_with_two_steps_in_flight(reported: int) -> None:
    loop = Loop()
    request = loop.add("a", range(9), max_tokens=8)
    other = loop.add("b", [30], max_tokens=8)
    loop.begin()
    loop.begin()
    for _ in range(reported):
        assert [name for name, _ in loop.end()] == ["a", "b"]
    assert loop.scheduler.abort(["a"]) == [request]
    again = loop.add("a", [7, 8], max_tokens=2)
    while loop.in_flight:
        assert [name for name, _ in loop.end()] == ["b"]
        if len(loop.in_flight) == 1 and again.status is RequestStatus.WAITING:
            schedule = loop.begin()
            assert schedule.finished_ids == ("a",)
            assert [new.token_ids for new in schedule.new_requests] == [[7, 8]]
            assert [name for name, _ in loop.end()] == ["b"]  # the last one of the old request
            assert [name for name, _ in loop.end()] == ["b", "a"]
    loop.finish()
    assert request.num_output_tokens == reported
    assert other.output_token_ids == expected_tokens([30], 8)
    assert again.output_token_ids == expected_tokens([7, 8], 2)


def test_prompts_are_found_in_the_step_after_the_one_that_computes_them() -> None:
    loop = Loop(budget=16)
    prompt = list(range(16))
    loop.add("a", prompt)
    second = loop.add("b", [*prompt, 40, 41])
    assert loop.begin().num_scheduled_tokens == {"a": 16}
    schedule = loop.begin()
    assert schedule.num_scheduled_tokens == {"a": 1, "b": 2}
    assert schedule.new_requests[0].num_computed_tokens == second.num_cached_tokens == 16
    loop.end()
    loop.end()
    loop.finish()
    assert second.output_token_ids == expected_tokens(second.prompt_token_ids, 4)


def test_a_block_with_an_unknown_token_is_not_found_before_the_token_is() -> None:
    """The third block is complete once the second token of the output is computed."""
    loop = Loop(budget=32)
    right = expected_tokens(list(range(10)), 8)
    loop.add("a", range(10), max_tokens=8)
    loop.begin()
    loop.begin()
    loop.end()
    loop.begin()  # computes the token that the step in flight samples
    loop.add("b", [*range(10), *right[:4]])
    assert loop.cache.stats.num_cached == 2
    loop.end()
    assert loop.begin().new_requests[0].num_computed_tokens == 12
    assert loop.cache.stats.num_cached == 3


def test_two_steps_are_in_flight_at_most() -> None:
    loop = Loop()
    loop.add("a", [1])
    loop.begin()
    loop.begin()
    with pytest.raises(RuntimeError, match="before the oldest step was reported"):
        loop.scheduler.schedule()
    first, second = loop.in_flight
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        loop.scheduler.update(*second)
    assert loop.scheduler.update(*first)
