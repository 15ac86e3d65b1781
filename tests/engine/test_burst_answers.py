"""Multi-step decode at the fronts: answers are those of the engine that goes step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engine_checks import check_idle, scheduler_of

from noria import LLM, AsyncLLM, SamplingParams
from noria.engine.outputs import RequestOutput
from noria.engine.request import FinishReason

TEXTS = ["the water wheel", "flour", "the miller waits and waits and waits for the river", "A"]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "plain"])
def bursts(options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**options, num_scheduler_steps=6, async_scheduling=request.param) as llm:
        yield llm
        check_idle(llm)


def answers(llm: LLM, params: SamplingParams, texts: list[str] = TEXTS) -> list:
    results = llm.generate(texts, params)
    return [(result.outputs, result.usage["completion_tokens"], result.finished) for result in results]


@pytest.mark.parametrize(
    "special",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 7},
        {"max_tokens": 23},
        {"max_tokens": None},
        {"max_tokens": 20, "n": 3},
        {"max_tokens": 30, "stop_token_ids": list(range(40, 52))},
        {"max_tokens": 30, "stop_token_ids": list(range(40, 52)), "min_tokens": 9},
        {"max_tokens": 30, "stop_token_ids": list(range(60, 100))},  # more than the device is told
        {"max_tokens": 30, "stop": ["e", "th"]},
        {"max_tokens": 30, "stop": ["e", "th"], "min_tokens": 8, "include_stop_str_in_output": True},
        {"max_tokens": 30, "ignore_eos": False},
    ],
    ids=str,
)
def test_answers_are_those_of_single_steps(bursts: LLM, llm: LLM, special: dict[str, Any]) -> None:
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        params = SamplingParams(**{"ignore_eos": True} | how | special)
        assert answers(bursts, params) == answers(llm, params)
        assert answers(bursts, params, TEXTS * 3) == answers(llm, params, TEXTS * 3)  # more than there are seats


def test_a_stream_gets_several_tokens_at_a_time(bursts: LLM, llm: LLM) -> None:
    before = bursts.stats.steps
    parts = list(bursts.stream(TEXTS[0], LONG))
    counts = [len(part.outputs[0].token_ids) for part in parts]
    assert (counts[0], max(counts), sum(counts)) == (1, 6, 40)
    assert bursts.stats.steps - before == 1 + 7  # 39 tokens after the first one
    [whole] = llm.generate(TEXTS[0], LONG)
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_stream_that_is_left_during_a_burst(bursts: LLM) -> None:
    stream = bursts.stream(TEXTS[0], LONG)
    next(stream)
    next(stream)
    stream.close()
    assert not scheduler_of(bursts).has_unfinished


def test_a_follow_up_finds_what_bursts_have_computed(bursts: LLM) -> None:
    prompt = [9 + i % 50 for i in range(12)]
    [first] = bursts.generate(prompt, LONG)
    ids = [*prompt, *first.outputs[0].token_ids]
    [second] = bursts.generate([*ids[:45], 5, 6], SamplingParams(temperature=0, max_tokens=3))
    assert second.num_cached_tokens == 40  # whole blocks of 8


def test_abort_during_a_burst(options: dict[str, Any], llm: LLM) -> None:
    engine = AsyncLLM(**options, num_scheduler_steps=6)

    async def work() -> tuple[RequestOutput, RequestOutput]:
        other = asyncio.create_task(collect(engine.generate(TEXTS[1], LONG)))
        stream = engine.generate(TEXTS[0], LONG, "mine")
        result = await anext(stream)
        engine.abort("mine")
        async for part in stream:
            result.add(part)
        return result, await other

    async def collect(stream: Any) -> RequestOutput:
        result = await anext(stream)
        async for part in stream:
            result.add(part)
        return result

    aborted, other = asyncio.run(asyncio.wait_for(work(), 60))
    engine.close()
    expected = llm.generate(TEXTS[:2], LONG)
    count = len(aborted.outputs[0].token_ids)
    assert aborted.outputs[0].finish_reason is FinishReason.ABORT
    assert 1 <= count < 40
    assert aborted.outputs[0].token_ids == expected[0].outputs[0].token_ids[:count]
    assert other.outputs == expected[1].outputs
