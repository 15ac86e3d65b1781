"""Clients that leave, requests that take too long, a queue that is full, an engine that dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import Service, Visitor, run, service
from test_completion_route import events
from test_refusals import CHAT, COMPLETIONS, GOOD, HELLO, error_of

from noria.text.tokenizer import Tokenizer

LONG = {"model": "parrot", "prompt": "flour", "max_tokens": 100}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_who_leaves_is_aborted_within_two_steps(tokenizer: Tokenizer, path: str, streamed: bool, several: bool) -> None:
    body: dict[str, Any] = {**LONG, "n": 2, "stream": streamed}
    if path == CHAT:
        del body["prompt"]
        body["messages"] = HELLO
    elif several:
        body["prompt"] = ["flour", "wheel"]

    async def work() -> None:
        async with service(tokenizer, step_s=0.002) as running:
            visitor = Visitor(running.app, path, json.dumps(body).encode())
            await running.steps(5)
            assert running.core.running
            left_at = running.core.num_steps
            visitor.leave()
            await visitor.task
            await running.until_idle()
            assert running.core.aborted_at
            assert max(running.core.aborted_at) - left_at <= 2
            assert running.engine._num_sequences == 0
            assert (b"[DONE]" in visitor.body) is False

    run(work())


def test_who_leaves_before_the_first_token(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer) as running:
            running.core.frozen = True
            visitor = Visitor(running.app, COMPLETIONS, json.dumps({**LONG, "stream": True}).encode())
            while not running.engine.num_unfinished:
                await asyncio.sleep(0)
            visitor.leave()
            await visitor.task
            running.core.frozen = False
            await running.until_idle()
            assert running.core.num_steps <= 1

    run(work())


def test_a_request_that_takes_too_long(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.01, request_timeout=0.4) as running:
            error = error_of(await running.http.post(COMPLETIONS, json=LONG), 504)
            assert (error["type"], error["code"]) == ("timeout_error", "timeout")
            assert "within 0.4 s" in error["message"]
            *parts, last = events(await running.http.post(COMPLETIONS, json={**LONG, "stream": True}))
            assert parts
            assert last["error"]["code"] == "timeout"
            await running.until_idle()
            assert len(running.core.aborted_at) == 2
            quick = await running.http.post(COMPLETIONS, json={**GOOD, "max_tokens": 1})
            assert quick.status_code == 200

    run(work())


async def fill(running: Service, count: int, **more: Any) -> list[asyncio.Future[Any]]:
    """So many long requests, all of which have come to the engine, which stands still meanwhile: on a slow machine the
    first would else be over before the last has come."""
    running.core.frozen = True
    goal = running.engine.num_unfinished + count
    posts = [asyncio.ensure_future(running.http.post(COMPLETIONS, json=LONG | more)) for _ in range(count)]
    while running.engine.num_unfinished < goal:
        await asyncio.sleep(0)
    return posts


def test_a_full_queue(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001, max_queued_requests=2) as running:  # and 4 that may run
            posts = await fill(running, 5)  # and none ends before the refusals
            response = await running.http.post(COMPLETIONS, json={**GOOD, "n": 2})
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert response.headers["retry-after"] == "1"
            posts += await fill(running, 1)  # there is room for one
            running.core.frozen = False
            assert {response.status_code for response in await asyncio.gather(*posts)} == {200}
            never = error_of(await running.http.post(COMPLETIONS, json={**GOOD, "prompt": ["a"] * 4, "n": 2}))
            assert "8 sequences exceeds the 6" in never["message"]

    run(work())


def test_an_engine_that_dies_is_an_error_at_once(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            posts = await fill(running, 3)
            [streamed] = await fill(running, 1, stream=True)
            running.core.frozen = False
            await running.steps(10)
            running.core.failure = RuntimeError("the device is gone")
            for post in posts:
                error = error_of(await post, 503)
                assert "the device is gone" in error["message"]
                assert error["code"] == "engine_dead"
            *_, last = events(await streamed)
            assert "the device is gone" in last["error"]["message"]
            assert (await running.http.get("/ready")).status_code == 503

    run(work())


def test_an_answer_that_fails_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from noria.engine.outputs import SequenceText

    original = SequenceText.push

    def push(self: SequenceText, token_ids: list[int]) -> str:
        if 9 in token_ids:
            raise ValueError("no text for 9")
        return original(self, token_ids)

    monkeypatch.setattr(SequenceText, "push", push)

    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            good, bad = await asyncio.gather(
                running.http.post(COMPLETIONS, json={**LONG, "prompt": [10, 11, 12]}),
                running.http.post(COMPLETIONS, json={**LONG, "prompt": [10, 11, 9]}),
            )
            assert good.json()["usage"]["completion_tokens"] == 100
            assert "failed while it ran" in error_of(bad, 500)["message"]

    run(work())


def test_an_operator_aborts_a_request(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            [post] = await fill(running, 1)
            running.core.frozen = False
            await running.steps(3)
            [stream] = running.engine._streams.values()
            running.engine.abort(stream.request_id)
            running.engine.abort("never there")
            assert "aborted" in error_of(await post, 503)["message"]
            await running.until_idle()

    run(work())
