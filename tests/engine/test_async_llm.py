"""The async front: concurrent streams, abort, consumers that leave, an engine that dies, closing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from engine_checks import check_idle, scheduler_of

from noria import LLM, AsyncLLM, SamplingParams
from noria.engine.outputs import RequestOutput
from noria.engine.request import FinishReason
from noria.errors import ConfigError, EngineDeadError, RequestError

TEXTS = ["the water wheel", "flour", "the miller waits and waits and waits for the river", "A"]
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Whatever hangs is an error, not a test run that never ends."""
    return asyncio.run(asyncio.wait_for(work, 60))


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    result = await anext(stream)
    async for part in stream:
        result.add(part)
    return result


async def until_idle(engine: AsyncLLM) -> None:
    while scheduler_of(engine).has_unfinished or engine._commands:
        await asyncio.sleep(0.005)
    check_idle(engine)
    assert not engine._streams


@pytest.fixture(scope="module")
def engine(options: dict) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**options)
    yield engine
    engine.close()


@pytest.fixture
def fresh(options: dict) -> Iterator[AsyncLLM]:
    """For tests after which an engine is good for nothing."""
    engine = AsyncLLM(**options)
    yield engine
    engine.close()


def test_concurrent_streams_equal_the_offline_front(engine: AsyncLLM, llm: LLM):
    jobs = [
        (text, SamplingParams(temperature=temperature, seed=seed, n=1 + seed % 2, max_tokens=5 + seed, ignore_eos=True))
        for seed in range(5)
        for temperature in (0.0, 1.0)
        for text in TEXTS
    ]

    async def work() -> list[RequestOutput]:
        return await asyncio.gather(*(collect(engine.generate(text, params)) for text, params in jobs))

    answers = run(work())
    expected = llm.generate([text for text, _ in jobs], [params for _, params in jobs])
    for answer, other in zip(answers, expected, strict=True):
        assert answer.finished
        assert answer.prompt == other.prompt
        assert answer.outputs == other.outputs
        assert answer.prompt_token_ids == other.prompt_token_ids
    run(until_idle(engine))


def test_several_event_loops_one_after_the_other(engine: AsyncLLM):
    answers = [run(collect(engine.generate(TEXTS[0], LONG))) for _ in range(3)]
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1


def test_parts_hold_what_is_new(engine: AsyncLLM, llm: LLM):
    async def work() -> list[RequestOutput]:
        return [part async for part in engine.generate(TEXTS[0], LONG)]

    parts = run(work())
    assert [len(part.outputs[0].token_ids) for part in parts] == [1] * 50
    assert "".join(part.outputs[0].text for part in parts) == llm.generate(TEXTS[0], LONG)[0].outputs[0].text


def test_abort_from_another_task(engine: AsyncLLM, llm: LLM):
    async def work() -> tuple[RequestOutput, RequestOutput]:
        other = asyncio.create_task(collect(engine.generate(TEXTS[1], LONG)))
        stream = engine.generate(TEXTS[0], LONG, "mine")
        result = await anext(stream)
        asyncio.get_running_loop().call_soon(engine.abort, "mine")
        async for part in stream:
            result.add(part)
        await until_idle_after(other)
        return result, other.result()

    async def until_idle_after(other: asyncio.Task) -> None:
        await other
        await until_idle(engine)

    aborted, other = run(work())
    assert aborted.finished
    assert aborted.outputs[0].finish_reason is FinishReason.ABORT
    assert 1 <= len(aborted.outputs[0].token_ids) < 50
    whole = llm.generate([TEXTS[0], TEXTS[1]], LONG)
    assert aborted.outputs[0].token_ids == whole[0].outputs[0].token_ids[: len(aborted.outputs[0].token_ids)]
    assert other.outputs[0].token_ids == whole[1].outputs[0].token_ids


def test_abort_ends_all_sequences_of_a_request(engine: AsyncLLM):
    async def work() -> list[RequestOutput]:
        params = SamplingParams(n=3, seed=1, max_tokens=50, ignore_eos=True)
        parts = []
        async for part in engine.generate(TEXTS[2], params, "three"):
            parts.append(part)
            engine.abort("three")  # more than once is no harm
        await until_idle(engine)
        return parts

    last = run(work())[-1]
    assert last.finished
    assert [o.finish_reason for o in last.outputs] == [FinishReason.ABORT] * 3
    engine.abort("never there")


def test_request_ids(engine: AsyncLLM):
    async def work() -> None:
        stream = engine.generate(TEXTS[0], LONG, "same")
        first = await anext(stream)
        assert first.request_id == "same"
        with pytest.raises(RequestError, match="request id same is in use"):
            await anext(engine.generate(TEXTS[1], LONG, "same"))
        ids = first.outputs[0].token_ids + [i async for part in stream for i in part.outputs[0].token_ids]
        assert len(ids) == 50
        assert (await collect(engine.generate(TEXTS[1], LONG, "same"))).finished  # free again
        await until_idle(engine)

    run(work())


def test_aborted_and_submitted_again_at_once(engine: AsyncLLM, llm: LLM):
    async def work() -> None:
        for text in TEXTS[:3]:
            stream = engine.generate(text, LONG, "again")
            await anext(stream)
            engine.abort("again")
        with pytest.raises(RequestError, match="empty"):
            await anext(engine.generate("", LONG, "again"))

    run(work())
    answer = run(collect(engine.generate(TEXTS[3], LONG, "again")))
    assert answer.outputs == llm.generate(TEXTS[3], LONG)[0].outputs
    gc.collect()
    run(until_idle(engine))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": [192]}, "192"),
        ({"prompt": [1] * 64}, "max_model_len"),
        ({"prompt": 5}, "not int"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params must be a SamplingParams"),
        ({"sampling_params": SamplingParams(stop_token_ids=[999])}, "stop_token_ids"),
        ({"request_id": ["a"]}, "request_id must be a string"),
        ({"cache_salt": 5}, "cache_salt must be a string"),
        ({"priority": "high"}, "priority must be an integer"),
    ],
)
def test_a_bad_request_fails_alone(engine: AsyncLLM, llm: LLM, arguments: dict, message: str):
    async def work() -> RequestOutput:
        good = asyncio.create_task(collect(engine.generate(TEXTS[0], LONG)))
        with pytest.raises(RequestError, match=message):
            await anext(engine.generate(**{"prompt": TEXTS[0], "sampling_params": LONG} | arguments))
        return await good

    assert run(work()).outputs == llm.generate(TEXTS[0], LONG)[0].outputs


def test_bad_options(options: dict):
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM(**options | {"max_model_len": 1000})
    with pytest.raises(ConfigError, match="unknown option"):
        AsyncLLM(**options, no_such_option=1)


def test_a_cancelled_consumer_frees_its_blocks(engine: AsyncLLM):
    async def work() -> None:
        tasks = [asyncio.create_task(collect(engine.generate(text, LONG))) for text in TEXTS * 5]
        while scheduler_of(engine).stats.cache.num_used == 0:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, asyncio.CancelledError) for result in results)
        await until_idle(engine)

    run(work())


def test_leaving_the_loop_frees_its_blocks(engine: AsyncLLM):
    async def work() -> None:
        stream = engine.generate(TEXTS[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await until_idle(engine)

    run(work())


def fail_at(engine: AsyncLLM, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device breaks after so many more steps."""
    runner, left = engine._front.engine.core.runner, [steps]
    original: Callable[[Any], Any] = runner.execute_model

    def execute_model(schedule: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the device is gone")
        return original(schedule)

    monkeypatch.setattr(runner, "execute_model", execute_model)


@pytest.mark.parametrize("steps", [0, 9])
def test_death_reaches_everybody_at_once(fresh: AsyncLLM, steps: int, monkeypatch: pytest.MonkeyPatch):
    fail_at(fresh, steps, monkeypatch)

    async def work() -> None:
        streams = [collect(fresh.generate(text, LONG)) for text in TEXTS * 4]  # more than there are seats
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert all("the device is gone" in str(result) for result in results)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await anext(fresh.generate("the", LONG))
        with pytest.raises(EngineDeadError):
            fresh.abort("x")

    run(work())
    fresh.close()


def test_requests_that_race_with_death(fresh: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    """Submitted in the moment before: the engine's thread never looks at them, but they must not wait forever."""

    async def work() -> None:
        first = asyncio.create_task(collect(fresh.generate("the", LONG)))
        while fresh.stats.steps == 0:
            await asyncio.sleep(0)
        with fresh._wake:  # the thread finds the commands and the failure together
            late = [asyncio.create_task(collect(fresh.generate(text, LONG))) for text in TEXTS]
            fail_at(fresh, 0, monkeypatch)
        results = await asyncio.gather(first, *late, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)

    run(work())


def test_closing_while_streams_run(fresh: AsyncLLM):
    async def work() -> None:
        tasks = [asyncio.create_task(collect(fresh.generate(text, LONG))) for text in TEXTS * 4]
        while fresh.stats.steps < 2:
            await asyncio.sleep(0)
        late = asyncio.create_task(collect(fresh.generate("the", LONG)))
        await asyncio.sleep(0)  # submitted, and perhaps not looked at
        await asyncio.to_thread(fresh.close)
        results = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert any(isinstance(result, EngineDeadError) for result in results)
        assert all(isinstance(r, EngineDeadError) or r.finished for r in results)
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(fresh.generate("the", LONG))

    run(work())
    fresh.close()  # again is no harm


def test_leaving_a_stream_after_the_end_is_quiet(fresh: AsyncLLM):
    async def work() -> None:
        stream = fresh.generate("the", LONG)
        await anext(stream)
        await asyncio.to_thread(fresh.close)
        await stream.aclose()

    run(work())


def test_context_manager(options: dict):
    async def work() -> None:
        async with AsyncLLM(**options) as engine:
            assert (await collect(engine.generate("the", LONG))).finished
            assert engine.tokenizer.vocab_size == 192
            assert engine.config.max_num_seqs == 8
        with pytest.raises(EngineDeadError):
            await anext(engine.generate("the", LONG))

    run(work())
