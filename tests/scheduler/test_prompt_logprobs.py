"""Log-probabilities of prompts come in parts, and what the prefix cache has would leave gaps."""

from __future__ import annotations

from scheduler_loop import Loop

from noria.scheduler.schedule import Schedule, StepResult, TokenLogprobs

PROMPT = list(range(10, 23))


def figures(token_id: int) -> TokenLogprobs:
    return ((token_id, -float(token_id), 1),)


def result_of(loop: Loop, schedule: Schedule, computed: int) -> StepResult:
    """What a runner would report of request "a"."""
    sampled = loop.runner.step(schedule).sampled_token_ids
    stop = min(computed + schedule.num_scheduled_tokens["a"] + 1, len(PROMPT))
    news = [figures(token_id) for token_id in PROMPT[computed + 1 : stop]]
    return StepResult(sampled, prompt_logprobs={"a": (computed + 1, news)} if news else {})


def test_parts_are_put_together() -> None:
    loop = Loop(budget=5)
    request = loop.add("a", PROMPT, max_tokens=2, prompt_logprobs=0)
    for computed in (0, 5, 10):
        assert request.needs_prompt_logprobs
        schedule = loop.scheduler.schedule()
        loop.scheduler.update(schedule, result_of(loop, schedule, computed))
    assert not request.needs_prompt_logprobs
    assert request.prompt_logprobs == [figures(token_id) for token_id in PROMPT[1:]]
    loop.finish()


def test_nothing_is_looked_up_while_some_are_missing() -> None:
    loop = Loop(budget=16)
    loop.add("before", PROMPT, max_tokens=1)
    loop.finish()
    request = loop.add("a", PROMPT, max_tokens=3, prompt_logprobs=0)
    schedule = loop.scheduler.schedule()
    assert schedule.num_scheduled_tokens == {"a": 13}
    loop.scheduler.update(schedule, result_of(loop, schedule, 0))
    assert request.num_cached_tokens == 0
    assert loop.cache.lookup(request).num_tokens > 0  # should it be preempted now
    loop.finish()
    assert loop.add("after", PROMPT, max_tokens=1).num_cached_tokens == 0
    assert loop.step().num_scheduled_tokens == {"after": 1}


def test_what_comes_for_a_request_that_has_ended_is_dropped() -> None:
    loop = Loop(budget=5)
    request = loop.add("a", PROMPT, prompt_logprobs=0)
    schedule = loop.scheduler.schedule()
    result = result_of(loop, schedule, 0)
    loop.scheduler.abort(["a"])
    again = loop.add("a", PROMPT[::-1], prompt_logprobs=0)
    loop.scheduler.update(schedule, result)
    assert set(request.prompt_logprobs) == set(again.prompt_logprobs) == {None}
