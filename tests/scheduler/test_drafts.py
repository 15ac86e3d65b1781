"""Steps in which guesses are verified: what is planned for them, and what is left of them when they are wrong."""

from __future__ import annotations

import random

import pytest
from fake_runner import expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_loop import Loop

from noria.engine.request import FinishReason, Request
from noria.scheduler.schedule import StepResult

PROMPT = [1, 2, 3, 4, 5]


def right(request: Request, count: int) -> list[int]:
    """The next `count` tokens of a request."""
    known = request.num_output_tokens
    return expected_tokens(request.prompt_token_ids, known + count, request.key)[known:]


def wrong(token_id: int) -> int:
    return (token_id + 1) % 50


def test_right_drafts_and_one_more_token() -> None:
    loop = Loop(rows_with_drafts=16)
    request = loop.add("a", PROMPT, max_tokens=20)
    loop.step()
    expected = right(request, 4)
    schedule = loop.begin(a=expected[:3])
    assert schedule.num_scheduled_tokens == {"a": 4}
    assert schedule.draft_token_ids == {"a": expected[:3]}
    assert request.num_placeholders == 4
    assert loop.end() == [("a", expected)]
    assert (request.num_computed_tokens, request.num_tokens) == (9, 10)
    loop.finish()
    assert request.output_token_ids == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_what_was_computed_behind_a_wrong_draft_is_computed_again(place: int) -> None:
    loop = Loop(rows_with_drafts=16)
    request = loop.add("a", PROMPT, max_tokens=20)
    loop.step()
    expected = right(request, 4)
    drafts = expected[:place] + [wrong(expected[place]), 7, 7][: 4 - place]
    loop.begin(a=drafts)
    assert loop.end() == [("a", expected[: place + 1])]
    assert request.num_computed_tokens == request.num_tokens - 1 == 6 + place
    assert loop.step().cached_requests[0].num_computed_tokens == 6 + place
    loop.finish()
    assert request.output_token_ids == expected_tokens(PROMPT, 20)


def test_the_next_step_waits_for_what_came_of_drafts() -> None:
    loop = Loop(rows_with_drafts=16)
    request = loop.add("a", PROMPT, max_tokens=20)
    loop.step()
    loop.begin(a=right(request, 2))
    with pytest.raises(RuntimeError, match="before the oldest step was reported"):
        loop.scheduler.schedule()


def test_drafts_are_limited_over_all_and_leave_a_token_for_everybody() -> None:
    loop = Loop(rows_with_drafts=8, budget=8)
    requests = [loop.add(name, PROMPT[:2], max_tokens=20) for name in "abc"]
    loop.step()
    drafts = {request.request_id: right(request, 4) for request in requests}
    schedule = loop.step(**drafts)
    assert schedule.num_scheduled_tokens == {"a": 5, "b": 2, "c": 1}
    assert {name: len(ids) for name, ids in schedule.draft_token_ids.items()} == {"a": 4, "b": 1}


def test_many_rows_are_enough_without_drafts() -> None:
    loop = Loop(rows_with_drafts=3)
    requests = [loop.add(name, PROMPT[:2], max_tokens=20) for name in "abc"]
    loop.step()
    assert loop.step(**{request.request_id: right(request, 2) for request in requests}).draft_token_ids == {}


def test_nobody_is_preempted_for_drafts() -> None:
    """Two requests fill the pool but for one block: the drafts would need two."""
    loop = Loop(num_blocks=8, max_model_len=28, rows_with_drafts=16)
    first, second = loop.add("a", range(11), max_tokens=17), loop.add("b", range(7), max_tokens=17)
    loop.step()
    loop.step()
    assert loop.cache.stats.num_free == 2
    schedule = loop.step(a=right(first, 6), b=right(second, 3))
    assert schedule.draft_token_ids == {}
    assert schedule.preempted_ids == ()
    assert schedule.num_scheduled_tokens.keys() == {"a", "b"}


def test_limits_and_stop_tokens_within_a_burst() -> None:
    loop = Loop(rows_with_drafts=16)
    outputs = expected_tokens(PROMPT, 8)
    limited = loop.add("limited", PROMPT, max_tokens=5)
    stopped = loop.add("stopped", PROMPT, max_tokens=20, stops={outputs[3]})
    later = loop.add("later", PROMPT, max_tokens=6, stops={outputs[3]}, min_tokens=5)
    loop.step()
    loop.step()
    known = len(limited.output_token_ids)
    loop.step(limited=outputs[known:4], stopped=outputs[known:6], later=outputs[known:5])
    assert limited.output_token_ids == outputs[:5]
    assert limited.finish_reason is FinishReason.LENGTH
    assert stopped.output_token_ids == outputs[: outputs.index(outputs[3]) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, outputs[3])
    assert later.output_token_ids == outputs[:6]
    assert loop.cache.stats.num_used == 0


def test_a_burst_of_drafts_in_which_no_token_can_be_sampled() -> None:
    loop = Loop(rows_with_drafts=16)
    request = loop.add("a", PROMPT, max_tokens=20)
    loop.step()
    schedule = loop.scheduler.schedule({"a": [1, 2]})
    [(_, tokens)] = loop.scheduler.update(schedule, StepResult({"a": [1, -1]}))
    assert (tokens, request.finish_reason) == ([1], FinishReason.ERROR)


def test_more_tokens_than_drafts_are_an_error() -> None:
    loop = Loop(rows_with_drafts=16)
    loop.add("a", PROMPT, max_tokens=20)
    loop.step()
    schedule = loop.scheduler.schedule({"a": [1, 2]})
    with pytest.raises(RuntimeError, match="due for 3"):
        loop.scheduler.update(schedule, StepResult({"a": []}))


@given(st.integers(0, 2**32), st.sampled_from([(None,), (None, 6, 6)]), st.booleans())
@settings(max_examples=40)
def test_random_lives_with_drafts(seed: int, windows: tuple[int | None, ...], caching: bool) -> None:
    """Small pool, chunked prompts, preemptions, some drafts right and some wrong; the runner checks what is read."""
    rng = random.Random(seed)
    loop = Loop(
        windows, num_blocks=2 + 14 * len(set(windows)), max_num_seqs=4, budget=10, max_model_len=40,
        caching=caching, rows_with_drafts=12, num_scheduler_steps=rng.choice([1, 3]),
    )  # fmt: skip
    requests = [
        loop.add(str(name), [rng.randrange(3) for _ in range(rng.randint(1, 18))], max_tokens=rng.randint(1, 20))
        for name in range(9)
    ]
    while loop.scheduler.has_unfinished:
        drafts = {}
        for request in loop.scheduler.running:
            room = request.max_num_tokens - 1 - request.num_tokens
            if request.num_computed_tokens == request.num_tokens - 1 and room > 0 and rng.random() < 0.7:
                tokens = right(request, rng.randint(1, min(room, 6)))
                if rng.random() < 0.5:
                    tokens[rng.randrange(len(tokens))] = rng.randrange(50)
                drafts[request.request_id] = tokens
        assert loop.step(**drafts).num_scheduled_tokens
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, request.num_output_tokens)
        assert request.num_tokens == request.max_num_tokens
    assert loop.cache.stats.num_used == 0
