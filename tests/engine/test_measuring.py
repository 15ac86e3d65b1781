"""What an engine lets others measure: steps as they are dispatched, the host gap, a prefix cache emptied."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engine_checks import check_idle

from noria import LLM, AsyncLLM, SamplingParams
from noria.scheduler.schedule import Schedule

PROMPT = [5 + index % 90 for index in range(30)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.usefixtures("llm")
def test_a_reset_prefix_cache_is_empty(llm: LLM) -> None:
    llm.reset_prefix_cache()
    runs = [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
    llm.reset_prefix_cache()
    assert llm.stats.scheduler.cache.num_cached == 0
    runs += [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
    assert [run.num_cached_tokens for run in runs] == [0, 24, 0, 24]
    assert len({tuple(run.outputs[0].token_ids) for run in runs}) == 1


def test_a_reset_in_the_middle_of_a_request_changes_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    tokens = []
    for part in llm.stream(PROMPT, GREEDY):
        tokens += part.outputs[0].token_ids
        llm.reset_prefix_cache()
    assert tokens == expected
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == 0


@pytest.fixture
def engine(options: dict) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**options)
    yield engine
    engine.close()


def test_the_async_front_resets_too(engine: AsyncLLM) -> None:
    async def cached() -> int:
        return [part async for part in engine.generate(PROMPT, GREEDY)][-1].num_cached_tokens

    async def both() -> list[int]:
        found = [await cached(), await cached()]
        engine.reset_prefix_cache()
        return [*found, await cached()]

    assert asyncio.run(asyncio.wait_for(both(), 60)) == [0, 24, 0]
    check_idle(engine)


def test_every_step_is_shown(llm: LLM) -> None:
    schedules: list[Schedule] = []
    before = llm.stats.steps
    llm.engine.core.on_schedule = schedules.append
    try:
        llm.reset_prefix_cache()
        llm.generate(PROMPT, GREEDY)
    finally:
        llm.engine.core.on_schedule = None
    # Chunks of 16 and 14 tokens, then one token each.
    assert [schedule.total_num_scheduled_tokens for schedule in schedules] == [16, 14, 1, 1, 1, 1, 1]
    assert llm.stats.steps == before + len(schedules)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_host_gap_is_a_share_of_the_time_with_work(options: dict, ahead: bool) -> None:
    with LLM(**options | {"async_scheduling": ahead}) as llm:
        assert llm.stats.times.wall_s == 0
        for _ in range(2):
            llm.generate(PROMPT, GREEDY)
        first, again = llm.stats.times, llm.stats.times
        assert first == again  # nothing counts while there is no work
        assert 0 < first.gap_s < first.wall_s
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        assert llm.stats.times.wall_s < llm.stats.times.wall_s  # now it does
        stream.close()
        ended = llm.stats.times
        assert ended.wall_s > first.wall_s
        assert llm.stats.times == ended
