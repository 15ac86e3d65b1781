"""Rules of bursts: several forward passes in one step, when everybody decodes and nobody can join."""

from __future__ import annotations

import pytest
from fake_runner import expected_tokens
from scheduler_loop import Loop

from noria.engine.request import FinishReason
from noria.scheduler.schedule import Schedule, StepResult


def burst_of(schedule: Schedule) -> tuple[int, dict[str, int]]:
    return schedule.num_steps, schedule.num_scheduled_tokens


def test_a_prompt_is_computed_in_a_single_step_and_what_follows_in_bursts() -> None:
    loop = Loop(num_scheduler_steps=4, budget=8)
    request = loop.add("a", range(11), max_tokens=10)
    steps = [burst_of(schedule) for schedule in loop.finish()]
    assert steps == [(1, {"a": 8}), (1, {"a": 3}), (4, {"a": 4}), (4, {"a": 4}), (1, {"a": 1})]
    assert request.output_token_ids == expected_tokens(list(range(11)), 10)
    assert request.finish_reason is FinishReason.LENGTH


def test_one_step_at_a_time_without_the_option() -> None:
    loop = Loop()
    loop.add("a", range(5), max_tokens=6)
    assert {schedule.num_steps for schedule in loop.finish()} == {1}


def test_a_burst_lasts_as_long_as_the_longest_has_use_for() -> None:
    loop = Loop(num_scheduler_steps=16)
    loop.add("a", [1, 2], max_tokens=3)
    loop.add("b", [3], max_tokens=7)
    loop.step()
    assert burst_of(loop.step()) == (6, {"a": 2, "b": 6})
    assert not loop.scheduler.has_unfinished


def test_while_others_wait_it_ends_with_the_first_to_make_room() -> None:
    loop = Loop(num_scheduler_steps=16, max_num_seqs=2)
    loop.add("a", [1, 2], max_tokens=4)
    loop.add("b", [3], max_tokens=9)
    late = loop.add("late", [4, 5], max_tokens=2)
    loop.step()
    assert burst_of(loop.step()) == (3, {"a": 3, "b": 3})
    assert burst_of(loop.step()) == (1, {"b": 1, "late": 2})
    assert burst_of(loop.step()) == (4, {"b": 4, "late": 1})
    assert late.output_token_ids == expected_tokens([4, 5], 2)


def test_who_waits_gets_the_place_of_one_whose_last_token_is_in_flight_at_once() -> None:
    loop = Loop(num_scheduler_steps=16, max_num_seqs=2)
    loop.add("a", [1, 2], max_tokens=1)
    loop.add("b", [3], max_tokens=20)
    loop.add("late", [4, 5], max_tokens=2)
    loop.begin()
    assert burst_of(loop.begin()) == (1, {"b": 1})
    loop.end()
    assert burst_of(loop.begin()) == (1, {"b": 1, "late": 2})


def test_no_burst_while_a_prompt_is_computed_or_could_be() -> None:
    loop = Loop(num_scheduler_steps=4, budget=8)
    loop.add("a", [1], max_tokens=20)
    loop.step()
    loop.add("b", range(10), max_tokens=20)
    assert burst_of(loop.step()) == (1, {"a": 1, "b": 7})
    assert burst_of(loop.step()) == (1, {"a": 1, "b": 3})
    assert burst_of(loop.step()) == (4, {"a": 4, "b": 4})


def test_most_model_len_ends_bursts() -> None:
    """Of a request that goes further there are single steps, for all; one that ends before does not shorten a burst."""
    loop = Loop(num_scheduler_steps=4, most_model_len=8)
    loop.add("a", [1, 2, 3], max_tokens=9)
    loop.add("b", [4], max_tokens=5)
    loop.step()
    steps = [burst_of(schedule) for schedule in loop.finish()]
    assert steps == [(4, {"a": 4, "b": 4}), *[(1, {"a": 1})] * 4]
    loop.add("c", [4], max_tokens=8)
    loop.step()
    assert [burst_of(schedule) for schedule in loop.finish()] == [(4, {"c": 4}), (3, {"c": 3})]


def test_max_model_len_ends_a_burst() -> None:
    loop = Loop(num_scheduler_steps=16, max_model_len=12)
    request = loop.add("a", range(5), max_tokens=None)
    loop.step()
    assert burst_of(loop.step()) == (6, {"a": 6})
    assert (request.finish_reason, request.num_tokens) == (FinishReason.LENGTH, 12)


def test_a_pool_without_room_for_all_tokens_shortens_it() -> None:
    """Nobody is preempted for the sake of a burst: it is halved until there is room, and single steps preempt."""
    loop = Loop(num_scheduler_steps=16, num_blocks=9, max_model_len=32, budget=32)
    loop.add("first", range(14), max_tokens=17)
    loop.add("last", range(20, 33), max_tokens=17)
    loop.step()  # eight blocks, all taken, with room for two tokens and for three
    assert burst_of(loop.step()) == (2, {"first": 2, "last": 2})
    schedule = loop.step()
    assert schedule.preempted_ids == ("last",)
    assert burst_of(schedule) == (1, {"first": 1})
    for schedule in loop.finish():
        assert schedule.num_steps == 1 or not schedule.preempted_ids


def test_blocks_behind_the_window_stay_until_the_first_pass_has_read_them() -> None:
    loop = Loop(windows=(4,), num_scheduler_steps=12, num_blocks=12)
    request = loop.add("a", range(6), max_tokens=20)
    loop.add("b", range(6), max_tokens=20)
    for _ in loop.finish():  # the fake runner reads every block
        pass
    assert request.output_token_ids == expected_tokens(list(range(6)), 20)


@pytest.mark.parametrize("knows_stops", [True, False])
def test_a_stop_token_ends_it(knows_stops: bool) -> None:
    """Also when the device does not know it: what comes after it is dropped."""
    right = expected_tokens(list(range(7)), 4)
    assert right[3] not in right[:3]
    loop = Loop(num_scheduler_steps=8, knows_stops=knows_stops)
    request = loop.add("a", range(7), max_tokens=9, stops=right[3:])
    loop.step()
    before = loop.runner.num_passes
    assert burst_of(loop.begin()) == (8, {"a": 8})
    assert loop.runner.num_passes - before == (3 if knows_stops else 8)
    assert loop.end() == [("a", right[1:])]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, right[3])
    assert loop.cache.stats.num_used == 0


def test_the_next_burst_is_planned_as_if_all_tokens_came() -> None:
    loop = Loop(num_scheduler_steps=4)
    request = loop.add("a", range(3), max_tokens=12)
    right = expected_tokens([0, 1, 2], 12)
    loop.begin()
    first, second = loop.begin(), None
    assert burst_of(first) == (4, {"a": 4})
    loop.end()
    second = loop.begin()
    assert (request.num_output_tokens, request.num_placeholders) == (1, 8)
    assert second.cached_requests[0].num_computed_tokens == 7
    assert loop.end() == [("a", right[1:5])]
    assert burst_of(loop.begin()) == (3, {"a": 3})
    assert loop.end() == [("a", right[5:9])]
    assert loop.begin() == Schedule()
    assert loop.end() == [("a", right[9:])]
    assert not loop.scheduler.has_unfinished


def test_a_burst_planned_for_a_request_that_had_ended_makes_no_pass() -> None:
    right = expected_tokens(list(range(7)), 4)
    loop = Loop(num_scheduler_steps=4)
    loop.add("a", range(7), max_tokens=20, stops=right[3:])
    loop.begin()
    loop.begin()
    loop.end()
    before = loop.runner.num_passes
    assert burst_of(loop.begin()) == (4, {"a": 4})
    assert loop.runner.num_passes == before
    assert loop.end() == [("a", right[1:])]
    assert loop.end() == []


@pytest.mark.parametrize("reported", [0, 1])
def test_abort_while_bursts_are_in_flight(reported: int) -> None:
    loop = Loop(num_scheduler_steps=4)
    gone = loop.add("a", range(9), max_tokens=20)
    other = loop.add("b", [30], max_tokens=20)
    loop.step()
    loop.begin()
    loop.begin()
    for _ in range(reported):
        loop.end()
    assert loop.scheduler.abort(["a"]) == [gone]
    again = loop.add("a", [7, 8], max_tokens=6)
    while loop.in_flight:
        assert [(name, len(tokens)) for name, tokens in loop.end()] == [("b", 4)]
    loop.finish()
    assert gone.num_output_tokens == 1 + 4 * reported
    assert other.output_token_ids == expected_tokens([30], 20)
    assert again.output_token_ids == expected_tokens([7, 8], 6)


def test_who_is_preempted_while_a_burst_is_in_flight_keeps_its_tokens() -> None:
    loop = Loop(num_scheduler_steps=2, num_blocks=9, budget=32, max_model_len=32)
    loop.add("first", range(14), max_tokens=9)
    last = loop.add("last", range(20, 34), max_tokens=9)
    loop.step()
    assert burst_of(loop.begin()) == (2, {"first": 2, "last": 2})
    schedule = loop.begin()
    assert (schedule.preempted_ids, burst_of(schedule)) == (("last",), (1, {"first": 1}))
    right = expected_tokens(list(range(20, 34)), 9)
    assert loop.end()[1] == ("last", right[1:3])
    loop.end()
    loop.finish()
    assert last.output_token_ids == right


def test_a_block_filled_within_a_burst_is_found() -> None:
    loop = Loop(num_scheduler_steps=8, budget=32)
    right = expected_tokens(list(range(6)), 9)
    loop.add("a", range(6), max_tokens=20)
    loop.step()
    loop.step()  # computes tokens 7 to 14
    assert loop.cache.stats.num_cached == 3
    loop.add("b", [*range(6), *right[:8]])
    assert loop.begin().new_requests[0].num_computed_tokens == 12
    loop.end()
    loop.finish()


@pytest.mark.parametrize(("length", "num_cached"), [(4, 2), (5, 2), (6, 2), (7, 3)])
def test_but_not_with_the_token_that_ended_it(length: int, num_cached: int) -> None:
    """It fills a block of its own (six tokens of prompt and `length`), but nobody computed it."""
    right = expected_tokens(list(range(6)), length)
    assert right[-1] not in right[:-1]
    loop = Loop(num_scheduler_steps=16)
    loop.add("a", range(6), max_tokens=20, stops=right[-1:])
    loop.finish()
    assert loop.cache.stats.num_cached == num_cached
    loop.add("b", [*range(6), *right, 3], max_tokens=3)
    assert loop.begin().new_requests[0].num_computed_tokens == 4 * num_cached
    loop.end()
    loop.finish()


def test_a_burst_that_yields_too_little_is_a_mistake() -> None:
    loop = Loop(num_scheduler_steps=4)
    loop.add("a", [1], max_tokens=9)
    loop.step()
    schedule = loop.scheduler.schedule()
    with pytest.raises(RuntimeError, match="yielded 3 tokens for request a, which was due for 4"):
        loop.scheduler.update(schedule, StepResult({"a": [1, 2, 3]}))


def test_numbers_gone_wrong_end_it() -> None:
    loop = Loop(num_scheduler_steps=4)
    request = loop.add("a", [1, 2], max_tokens=9)
    loop.step()
    [(_, tokens)] = loop.scheduler.update(loop.scheduler.schedule(), StepResult({"a": [5, -1]}))
    assert tokens == [5]
    assert request.finish_reason is FinishReason.ERROR
    assert loop.cache.stats.num_cached == 0  # who knows what its blocks hold


def test_no_burst_while_one_that_is_shaped_runs() -> None:
    loop = Loop(num_scheduler_steps=4)
    loop.add("plain", [1, 2], max_tokens=12)
    shaped = loop.add("shaped", [3], max_tokens=3, presence_penalty=1.0)
    assert shaped.is_shaped
    steps = [burst_of(schedule) for schedule in loop.finish()]
    assert steps[:3] == [(1, {"plain": 2, "shaped": 1}), (1, {"plain": 1, "shaped": 1}), (1, {"plain": 1, "shaped": 1})]
    assert steps[3] == (4, {"plain": 4})


def test_log_probabilities_of_a_prompt_do_not_hold_up_bursts() -> None:
    loop = Loop(num_scheduler_steps=4)
    loop.add("a", [1, 2], max_tokens=9, prompt_logprobs=0)
    schedule, result = loop.scheduler.schedule(), {"a": (1, [((2, -0.5, 1),)])}
    sampled = loop.runner.step(schedule).sampled_token_ids
    loop.scheduler.update(schedule, StepResult(sampled, prompt_logprobs=result))
    assert burst_of(loop.step()) == (4, {"a": 4})
