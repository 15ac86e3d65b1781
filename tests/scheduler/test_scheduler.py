"""Single rules of the scheduler, each through schedule() and update() with a runner that checks the cache."""

from __future__ import annotations

import pytest
from fake_runner import expected_tokens
from scheduler_loop import Loop

from noria.engine.request import FinishReason, RequestStatus
from noria.errors import ConfigError, RequestError
from noria.scheduler.schedule import Schedule, StepResult


def test_one_request_from_prompt_to_end() -> None:
    loop = Loop()
    request = loop.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    assert (loop.scheduler.num_waiting, loop.scheduler.num_running) == (1, 0)
    first = loop.step()
    (new,) = first.new_requests
    assert (new.request_id, new.token_ids, new.num_prompt_tokens, new.num_computed_tokens) == (
        "a",
        [1, 2, 3, 4, 5],
        5,
        0,
    )
    assert len(new.block_ids[0]) == 2
    assert first.num_scheduled_tokens == {"a": 5}
    assert request.status is RequestStatus.RUNNING
    (cached,) = loop.step().cached_requests
    assert (cached.request_id, cached.num_computed_tokens, cached.new_block_ids, cached.resumed) == (
        "a",
        5,
        ([],),
        False,
    )
    loop.step()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == expected_tokens([1, 2, 3, 4, 5], 3)
    assert not loop.scheduler.has_unfinished
    assert loop.cache.stats.num_used == 0


def test_a_schedule_owns_its_token_ids() -> None:
    loop = Loop()
    request = loop.add("a", [1, 2, 3])
    schedule = loop.step()
    assert schedule.new_requests[0].token_ids == [1, 2, 3]
    assert request.num_tokens == 4


def test_long_prompts_are_computed_in_chunks_after_the_running_requests() -> None:
    loop = Loop(budget=8)
    loop.add("short", [1, 2], max_tokens=6)
    long = loop.add("long", range(20), max_tokens=2)
    assert loop.step().num_scheduled_tokens == {"short": 2, "long": 6}
    assert long.num_output_tokens == 0
    assert loop.step().num_scheduled_tokens == {"short": 1, "long": 7}
    assert loop.step().num_scheduled_tokens == {"short": 1, "long": 7}
    assert long.output_token_ids == expected_tokens(list(range(20)), 1)
    assert loop.step().num_scheduled_tokens == {"short": 1, "long": 1}
    loop.finish()
    assert long.output_token_ids == expected_tokens(list(range(20)), 2)


def test_a_token_sampled_before_the_prompt_is_complete_is_dropped() -> None:
    loop = Loop(budget=4)
    request = loop.add("a", range(6))
    schedule = loop.scheduler.schedule()
    loop.runner.step(schedule)
    assert loop.scheduler.update(schedule, StepResult({"a": [7]})) == []
    assert (request.token_ids, request.num_computed_tokens) == (list(range(6)), 4)


def test_update_returns_requests_with_their_tokens_and_stops_at_the_end() -> None:
    loop = Loop()
    request = loop.add("a", [1, 2], max_tokens=3)
    schedule = loop.scheduler.schedule()
    assert loop.scheduler.update(schedule, StepResult({"a": [5, 6, 7, 8]})) == [(request, [5, 6, 7])]
    assert request.is_finished


def test_num_seqs_and_budget_limit_a_step() -> None:
    loop = Loop(max_num_seqs=3, budget=4)
    for name in "abcde":
        loop.add(name, [1, 2], max_tokens=5)
    assert loop.step().num_scheduled_tokens == {"a": 2, "b": 2}
    assert loop.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 2}
    assert loop.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (3, 2)
    loop.finish()


def test_prefix_hits_are_not_scheduled_again() -> None:
    loop = Loop(budget=32)
    prompt = list(range(16))
    first = loop.add("a", prompt)
    loop.step()
    second = loop.add("b", [*prompt, 40, 41])
    same = loop.add("c", prompt)
    schedule = loop.step()
    assert schedule.num_scheduled_tokens == {"a": 1, "b": 2, "c": 4}  # the last token is computed again
    assert [new.num_computed_tokens for new in schedule.new_requests] == [16, 12]
    assert [r.num_cached_tokens for r in (first, second, same)] == [0, 16, 12]
    loop.finish()
    assert second.output_token_ids == expected_tokens([*prompt, 40, 41], 4)
    assert same.output_token_ids == first.output_token_ids == expected_tokens(prompt, 4)
    assert loop.scheduler.stats.cache.prefix_hits == 28


def test_requests_of_one_step_do_not_hit_each_other() -> None:
    loop = Loop(budget=64)
    loop.add("a", range(16))
    loop.add("b", range(16))
    assert loop.step().num_scheduled_tokens == {"a": 16, "b": 16}
    loop.finish()


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_takes_the_last_and_resumes_it_with_all_its_tokens(caching: bool) -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32, caching=caching)  # eight blocks of four tokens
    first = loop.add("first", range(14), max_tokens=8)
    last = loop.add("last", range(20, 34), max_tokens=8)
    assert loop.step().num_scheduled_tokens == {"first": 14, "last": 14}
    loop.step()
    loop.step()  # both have 17 tokens, 16 of them computed
    waiting = loop.add("waiting", [9, 9])
    schedule = loop.step()
    assert schedule.preempted_ids == ("last",)
    assert schedule.num_scheduled_tokens == {"first": 1}  # nobody is admitted in such a step
    assert (last.status, last.num_computed_tokens, last.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert waiting.status is RequestStatus.WAITING
    schedules = loop.finish()
    resumed_at = next(i for i, s in enumerate(schedules) if "last" in s.num_scheduled_tokens)
    resumed = next(c for c in schedules[resumed_at].cached_requests if c.request_id == "last")
    assert resumed.resumed
    assert resumed.token_ids == [*range(20, 34), *expected_tokens(list(range(20, 34)), 3)]
    started_at = next(i for i, s in enumerate(schedules) if "waiting" in s.num_scheduled_tokens)
    assert resumed_at <= started_at  # the preempted one is first in the queue
    for request in (first, last):
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 8)
    assert last.num_cached_tokens == 0
    assert loop.scheduler.stats.num_preemptions >= 1


def test_a_request_preempts_itself_when_it_is_the_last() -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32)
    loop.add("first", range(14), max_tokens=4)
    last = loop.add("last", range(20, 36), max_tokens=4)  # four full blocks
    loop.step()
    assert loop.cache.stats.num_free == 0
    schedule = loop.step()
    assert schedule.preempted_ids == ("last",)
    assert schedule.num_scheduled_tokens == {"first": 1}
    loop.finish()
    assert last.output_token_ids == expected_tokens(last.prompt_token_ids, 4)


def test_order_of_arrival_survives_preemption() -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32)
    requests = [loop.add(name, range(i * 10, i * 10 + 7), max_tokens=10) for i, name in enumerate("abcd")]
    finished: list[str] = []
    while loop.scheduler.has_unfinished:
        loop.step()
        finished += [r.request_id for r in requests if r.is_finished and r.request_id not in finished]
    assert finished == list("abcd")
    assert loop.scheduler.stats.num_preemptions > 0


def test_priority_decides_who_waits_and_who_is_preempted() -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32, policy="priority")
    low = loop.add("low", range(14), max_tokens=8, priority=5)
    high = loop.add("high", range(20, 34), max_tokens=8, priority=1)
    assert list(loop.step().num_scheduled_tokens) == ["high", "low"]
    loop.add("next", [1], priority=3)
    schedules = loop.finish()
    assert next(s.preempted_ids for s in schedules if s.preempted_ids) == ("low",)
    assert high.num_preemptions == 0
    assert low.output_token_ids == expected_tokens(low.prompt_token_ids, 8)
    first = {
        name: next(i for i, s in enumerate(schedules) if name in s.num_scheduled_tokens) for name in ("low", "next")
    }
    assert first["next"] <= next(
        i for i, s in enumerate(schedules) if any(c.resumed and c.request_id == "low" for c in s.cached_requests)
    )


def test_precedence_counts_from_the_moment_of_admission() -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32, policy="priority")
    loop.add("low", range(14), max_tokens=8, priority=2)
    loop.step()
    high = loop.add("high", range(20, 34), max_tokens=8, priority=1)
    assert loop.step().num_scheduled_tokens == {"low": 1, "high": 14}
    assert list(loop.step().num_scheduled_tokens) == ["high", "low"]
    schedules = loop.finish()
    assert [s.preempted_ids for s in schedules if s.preempted_ids] == [("low",)]
    assert high.output_token_ids == expected_tokens(high.prompt_token_ids, 8)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32, policy="priority")
    loop.add("high", range(16), max_tokens=3, priority=1)
    loop.add("low", range(20, 36), max_tokens=3, priority=2)
    loop.step()
    loop.add("highest", [1], max_tokens=1, priority=0)  # would find room in the blocks of "low"
    schedule = loop.step()
    assert schedule.preempted_ids == ("low",)
    assert schedule.num_scheduled_tokens == {"high": 1}
    assert loop.step().num_scheduled_tokens == {"high": 1, "highest": 1}
    loop.finish()


def test_fcfs_ignores_priority() -> None:
    loop = Loop()
    loop.add("a", [1], priority=5)
    loop.add("b", [1], priority=1)
    assert list(loop.step().num_scheduled_tokens) == ["a", "b"]


def test_finished_ids_are_reported_once_and_wait_for_a_step_with_tokens() -> None:
    loop = Loop()
    loop.add("a", [1], max_tokens=1)
    loop.step()
    assert loop.scheduler.schedule() == Schedule()
    assert loop.scheduler.update(Schedule(), StepResult({})) == []
    loop.add("b", [1], max_tokens=2)
    assert loop.step().finished_ids == ("a",)
    assert loop.step().finished_ids == ()


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "in flight"])
def test_abort_in_every_state(when: str) -> None:
    loop = Loop(num_blocks=9, budget=32, max_model_len=32)
    other = loop.add("other", range(14), max_tokens=8)
    request = loop.add("a", range(20, 34), max_tokens=8)
    steps = {"waiting": 0, "running": 1, "preempted": 4, "in flight": 1}[when]
    for _ in range(steps):
        loop.step()
    assert (request.status is RequestStatus.PREEMPTED) == (when == "preempted")
    if when == "in flight":
        schedule = loop.scheduler.schedule()
        result = loop.runner.step(schedule)
        assert loop.scheduler.abort(["nobody", "a"]) == [request]
        assert [r for r, _ in loop.scheduler.update(schedule, result)] == [other]
    else:
        assert loop.scheduler.abort(["nobody", "a"]) == [request]
    loop.scheduler.check_integrity()
    assert request.finish_reason is FinishReason.ABORT
    assert loop.scheduler.abort(["a"]) == []
    assert loop.step().finished_ids == (() if when == "waiting" else ("a",))  # the runner never saw a waiting one
    loop.finish()
    assert other.output_token_ids == expected_tokens(other.prompt_token_ids, 8)


def test_abort_keeps_a_reason_given_before() -> None:
    loop = Loop()
    request = loop.add("a", [1])
    loop.step()
    request.finish(FinishReason.STOP, "stop string")
    loop.scheduler.abort(["a"])
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop string")
    assert not loop.scheduler.has_unfinished


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_id_that_is_aborted_and_submitted_again_is_two_requests(in_flight: bool) -> None:
    loop = Loop()
    loop.add("a", [1, 2, 3])
    loop.step()
    schedule = loop.scheduler.schedule() if in_flight else None
    loop.scheduler.abort(["a"])
    again = loop.add("a", [4, 5], max_tokens=2)
    if schedule is not None:
        assert loop.scheduler.update(schedule, loop.runner.step(schedule)) == []
        assert again.num_output_tokens == 0
    both = loop.step()
    assert both.finished_ids == ("a",)
    assert [new.token_ids for new in both.new_requests] == [[4, 5]]
    loop.finish()
    assert again.output_token_ids == expected_tokens([4, 5], 2)


def test_bad_requests_are_refused() -> None:
    loop = Loop(max_model_len=8)
    loop.add("a", [1])
    with pytest.raises(RequestError, match="request id a is in use"):
        loop.add("a", [1])
    with pytest.raises(RequestError, match="the prompt has 8 tokens"):
        loop.add("b", range(8))
    with pytest.raises(RequestError, match="the prompt has 0 tokens"):
        loop.add("c", [])
    loop.add("d", range(7))
    loop.finish()


def test_max_model_len_ends_a_request() -> None:
    loop = Loop(max_model_len=8)
    request = loop.add("a", range(5), max_tokens=100)
    loop.finish()
    assert (request.num_tokens, request.finish_reason) == (8, FinishReason.LENGTH)


@pytest.mark.parametrize(("windows", "fitting"), [([None], 16), ([None, 8], 16 + 7)])
def test_a_pool_too_small_for_one_request_is_refused(windows: list[int | None], fitting: int) -> None:
    """64 tokens; the sliding group touches at most 7 blocks of 4 with a window of 8 and chunks of 16."""
    Loop(windows, num_blocks=fitting + 1)
    with pytest.raises(ConfigError, match=f"has {fitting - 1} blocks, but .* needs {fitting}; lower max_model_len"):
        Loop(windows, num_blocks=fitting)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduling policy"):
        Loop(policy="fair")  # type: ignore[arg-type]


def test_what_is_reported_must_be_what_is_in_flight() -> None:
    loop = Loop()
    loop.add("a", [1])
    schedule = loop.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        loop.scheduler.update(Schedule(num_scheduled_tokens={"a": 1}), StepResult({"a": [1]}))
    with pytest.raises(RuntimeError, match="0 tokens for request a, which was due for 1"):
        loop.scheduler.update(schedule, StepResult({}))


def test_mixed_groups_return_blocks_and_still_give_the_right_tokens() -> None:
    loop = Loop([None, 6, 6], num_blocks=40, budget=8)
    requests = [loop.add(name, range(i, i + 30), max_tokens=20) for i, name in enumerate("abc")]
    while loop.scheduler.has_unfinished:
        loop.step()
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                assert all(held <= 5 for held in loop.cache.blocks_held(request.request_id)[1:])
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 20)


@pytest.mark.parametrize("field", ["num_placeholders", "num_computed_tokens"])
def test_integrity_check_sees_a_wrong_count(field: str) -> None:
    loop = Loop()
    request = loop.add("a", [1])
    loop.step()
    setattr(request, field, getattr(request, field) + 2)
    with pytest.raises(RuntimeError, match=r"request a (waits for|has more) tokens"):
        loop.scheduler.check_integrity()


def test_integrity_check_sees_a_lost_request() -> None:
    loop = Loop()
    request = loop.add("a", [1])
    loop.step()
    loop.scheduler._running.clear()
    with pytest.raises(RuntimeError, match="1 tables and 0 running"):
        loop.scheduler.check_integrity()
    loop.scheduler._running.append(request)
    loop.cache.free(request)
    with pytest.raises(RuntimeError, match="0 tables and 1 running"):
        loop.scheduler.check_integrity()
