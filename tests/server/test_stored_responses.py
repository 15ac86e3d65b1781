"""Responses that are kept: limits, ids, the background, and what is left when somebody goes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_engine import Service, Visitor
from responses_client import RESPONSES, check_order, sent_events, strict, talking
from test_refusals import error_of

from noria.server.errors import ApiError
from noria.server.responses.store import Record, ResponseStore
from noria.text.tokenizer import Tokenizer

BODY: Any = {"model": "parrot", "input": "why", "max_output_tokens": 4}
LONG: Any = {"model": "parrot", "input": "why", "max_output_tokens": 100}


def record(name: str, size: int, status: str = "completed") -> Record:
    return Record({"id": name, "status": status, "output": []}, (), size)


def names_in(store: ResponseStore, names: str) -> str:
    def is_there(name: str) -> bool:
        try:
            return store.get(name).id == name
        except ApiError as error:
            return error.status != 404

    return "".join(name for name in names if is_there(name))


def test_the_least_recently_used_makes_room() -> None:
    store = ResponseStore(4000)
    for name in "abc":
        store.add(record(name, 1000))
    store.get("a")
    store.add(record("d", 1000))
    assert store.num_bytes <= 4000
    assert names_in(store, "abcd") == "acd"
    store.add(record("e", 5000))  # alone too large: nobody makes room for it
    assert names_in(store, "acde") == "acd"


def test_what_runs_has_its_place() -> None:
    store = ResponseStore(3000)
    running = record("a", 2000, "in_progress")
    store.add(running)
    store.add(record("b", 2000))
    assert names_in(store, "ab") == "a"
    running.response["status"] = "completed"
    running.events = [b"x" * 2000]
    store.settle(running)
    assert len(store) == store.num_bytes == 0
    store.settle(running)
    store.remove(running)
    assert store.num_bytes == 0


def test_retrieve_and_delete(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        made = await client.responses.create(**BODY)
        assert await client.responses.retrieve(made.id) == made
        await client.responses.delete(made.id)
        assert running.state.responses.num_bytes == 0
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await ask(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(**BODY, previous_response_id=made.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")

    talking(tokenizer, work)


def test_store_false_keeps_nothing(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        made = await client.responses.create(**BODY, store=False)
        assert made.model_extra == {"store": False}
        stream = await client.responses.create(**BODY, store=False, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"
        assert len(running.state.responses) == 0

    talking(tokenizer, work)


def test_a_server_without_a_store(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        made = await client.responses.create(**BODY)
        assert made.model_extra == {"store": False}
        for asked in ("store", "background"):
            error = error_of(await running.http.post(RESPONSES, json={**BODY, asked: True}))
            assert error["message"].startswith(f"{asked} needs a server that was started with --response-store-bytes")
        assert len(running.state.responses) == 0

    talking(tokenizer, work, response_store_bytes=0)


def test_a_conversation_goes_on_when_its_beginning_is_dropped(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        first = await client.responses.create(**BODY)
        second = await client.responses.create(**BODY, previous_response_id=first.id)
        with_first = await client.responses.create(**BODY, previous_response_id=second.id)
        await client.responses.delete(first.id)
        without = await client.responses.create(**BODY, previous_response_id=second.id)
        assert without.output_text == with_first.output_text
        assert without.usage == with_first.usage

    talking(tokenizer, work)


def test_input_items_come_in_pages(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        items: Any = [{"role": "user", "content": str(index), "id": f"m{index}"} for index in range(5)]
        made = await client.responses.create(**{**BODY, "input": items})
        down = [item.id async for item in await client.responses.input_items.list(made.id, limit=2)]
        up = [item.id async for item in await client.responses.input_items.list(made.id, limit=2, order="asc")]
        assert up == [f"m{index}" for index in range(5)]
        assert down == up[::-1]
        path = f"{RESPONSES}/{made.id}/input_items"
        page = (await running.http.get(path, params={"limit": 2, "after": "m3"})).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("m2", "m1", True)
        last = (await running.http.get(path, params={"after": "m0"})).json()
        assert (last["data"], last["has_more"]) == ([], False)
        bad = {"limit": "0", "order": "up", "after": "m9", "include": "x"}
        bad_pages = [await running.http.get(path, params={name: value}) for name, value in bad.items()]
        assert [error_of(page)["param"] for page in bad_pages] == list(bad)

    talking(tokenizer, work)


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "?include=message.output_text.logprobs", "include"),
        ("GET", "?stream=maybe", "stream"),
        ("GET", "?stream=true", "stream"),
        ("GET", "?starting_after=3", "starting_after"),
        ("GET", "?stream=true&starting_after=x", "stream"),
        ("GET", "?include_obfuscation=true", "include_obfuscation"),
        ("DELETE", "?x=1", "x"),
        ("POST", "/cancel", None),
    ],
)
def test_bad_questions(tokenizer: Tokenizer, method: str, path: str, param: str | None) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        made = await client.responses.create(**BODY)
        error = error_of(await running.http.request(method, f"{RESPONSES}/{made.id}{path}"))
        assert error["param"] == param

    talking(tokenizer, work)


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    while (response := await client.responses.retrieve(response_id)).status == "in_progress":
        await asyncio.sleep(0.001)
    return strict(response)


def test_in_the_background(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        begun = await client.responses.create(**LONG, background=True)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        assert running.state.active == 1  # the end of the server waits for it
        with pytest.raises(openai.BadRequestError, match="still runs"):
            await client.responses.create(**BODY, previous_response_id=begun.id)
        done = await ended(client, begun.id)
        assert done.output_text == (await client.responses.create(**LONG)).output_text
        assert (await client.responses.cancel(begun.id)).status == done.status == "incomplete"
        await running.until_idle()

    talking(tokenizer, work, step_s=0.001)


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_the_background_can_be_ended(tokenizer: Tokenizer, end: str) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        begun = await client.responses.create(**LONG, background=True)
        await running.steps(5)
        gone_at = running.core.num_steps
        result = await getattr(client.responses, end)(begun.id)
        await running.until_idle()
        assert running.core.aborted_at.pop() <= gone_at + 2
        if end == "cancel":
            assert strict(result).status == "cancelled"
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
            await client.responses.create(**BODY, previous_response_id=begun.id)
        else:
            assert len(running.state.responses) == running.state.responses.num_bytes == 0

    talking(tokenizer, work, step_s=0.001)


def test_the_background_before_its_first_step(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        running.core.frozen = True
        begun = await client.responses.create(**LONG, background=True)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        running.core.frozen = False
        await running.until_idle()

    talking(tokenizer, work)


def test_the_background_fails_for_itself(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        begun = await client.responses.create(**LONG, background=True)
        await running.steps(3)
        running.core.failure = RuntimeError("the device is gone")
        failed = await ended(client, begun.id)
        assert failed.status == "failed"
        assert "the device is gone" in failed.error.message
        assert running.state.active == 0

    talking(tokenizer, work, step_s=0.001)


def test_a_stream_of_the_background_is_followed_again(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        body = json.dumps({**LONG, "background": True, "stream": True}).encode()
        visitor = Visitor(running.app, RESPONSES, body)
        await running.steps(5)
        visitor.leave()
        await visitor.task
        first = json.loads(visitor.body.split(b"\n")[1].removeprefix(b"data: "))
        name, seen = first["response"]["id"], visitor.body.count(b"\n\n")
        assert 2 < seen < 50
        stream = await client.responses.retrieve(name, stream=True, starting_after=seen - 1)
        rest = [event.sequence_number async for event in stream]
        everything = sent_events((await running.http.get(f"{RESPONSES}/{name}", params={"stream": "true"})).content)
        check_order(everything)
        assert rest == [event["sequence_number"] for event in everything[seen:]]
        assert running.core.aborted_at == []
        again = await running.http.get(f"{RESPONSES}/{name}", params={"stream": "true", "starting_after": 10**6})
        assert again.content == b""

    talking(tokenizer, work, step_s=0.001)


def test_a_response_that_runs_is_there(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        posted = asyncio.ensure_future(client.responses.create(**LONG))
        await running.steps(3)
        [name] = running.state.responses._records
        assert strict(await client.responses.retrieve(name)).status == "in_progress"
        await client.responses.delete(name)
        assert (await posted).id == name
        assert len(running.state.responses) == running.state.responses.num_bytes == 0

    talking(tokenizer, work, step_s=0.001)
