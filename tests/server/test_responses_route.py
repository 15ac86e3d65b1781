"""/v1/responses with the official client, on an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_engine import MAX_MODEL_LEN, Service, Visitor
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from responses_client import RESPONSES, ask, check_order, sent_events, strict, talking
from test_chat_route import chat

from noria.text.tokenizer import Tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS: Any = ["message.output_text.logprobs"]


def text_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], count: int = 8, **options: Any) -> str:
    """What a chat is answered with: it went the same way."""
    answer = chat(tokenizer, messages=messages, max_completion_tokens=count, **options)
    return answer["choices"][0]["message"]["content"]


async def said(running: Service, messages: list[dict[str, Any]], count: int = 8) -> str:
    """The same inside a service."""
    body = {"model": "parrot", "messages": messages, "max_completion_tokens": count}
    return (await running.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]


def test_a_whole_response(tokenizer: Tokenizer) -> None:
    response = ask(
        tokenizer, max_output_tokens=8, metadata={"a": "b"}, user="me", temperature=0.5, extra_body={"seed": 3}
    )
    assert response.output_text == text_of(tokenizer, [{"role": "user", "content": "why"}])
    assert (response.object, response.model, response.error) == ("response", "parrot", None)
    assert response.id.startswith("resp_")
    [message] = response.output
    assert message.type == "message"
    assert message.id.startswith("msg_")
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == 8
    assert usage.total_tokens == usage.input_tokens + 8
    assert usage.input_tokens_details.cached_tokens == (usage.input_tokens - 1) // 16 * 16
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (response.metadata, response.user, response.temperature) == ({"a": "b"}, "me", 0.5)
    assert (response.tools, response.tool_choice, response.truncation) == ([], "auto", "disabled")


def test_a_response_ends_by_itself(tokenizer: Tokenizer) -> None:
    stop = text_of(tokenizer, [{"role": "user", "content": "why"}])[3:5]
    response = ask(tokenizer, extra_body={"stop": [stop]})
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.completed_at is not None
    assert stop not in response.output_text
    assert response.output[0].status == "completed"  # type: ignore[union-attr]


def test_a_response_may_be_as_long_as_the_model_allows(tokenizer: Tokenizer) -> None:
    usage = ask(tokenizer).usage
    assert usage is not None
    assert usage.total_tokens == MAX_MODEL_LEN


def test_streamed_events_are_those_of_the_api(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        body = {"model": "parrot", "input": "why", "max_output_tokens": 12, "stream": True}
        raw = await running.http.post(RESPONSES, json=body)
        events = sent_events(raw.content)
        check_order(events)
        for event in events:
            EVENT.validate_python(event)
        stream = await client.responses.create(model="parrot", input="why", max_output_tokens=12, stream=True)
        assert [event.type async for event in stream] == [event["type"] for event in events]
        whole = await client.responses.create(model="parrot", input="why", max_output_tokens=12)
        assert Response.model_validate(events[-1]["response"]).output_text == whole.output_text
        assert Response.model_validate(events[-1]["response"]).usage == strict(whole).usage

    talking(tokenizer, work)


def test_the_clients_own_stream(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        text = await said(running, [{"role": "user", "content": "why"}])
        body: Any = {"model": "parrot", "input": "why", "extra_body": {"stop": [text[3:5]]}}
        async with client.responses.stream(**body) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == (await client.responses.create(**body)).output_text

    talking(tokenizer, work)


def test_instructions_come_first_and_are_not_carried_over(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        body: Any = {"model": "parrot", "max_output_tokens": 4}
        first = await client.responses.create(input="why", instructions="be brief", **body)
        assert first.instructions == "be brief"
        system = {"role": "system", "content": "be brief"}
        assert first.output_text == await said(running, [system, {"role": "user", "content": "why"}], 4)
        second = await client.responses.create(input="how", previous_response_id=first.id, **body)
        spelled = [
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "how"},
        ]
        assert second.output_text == await said(running, spelled, 4)

    talking(tokenizer, work)


def test_a_conversation_by_id_is_the_one_spelled_out(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        body: Any = {"model": "parrot", "max_output_tokens": 4}
        previous, items, texts = None, [], []
        for question in ("a", "why", "how"):
            items.append({"role": "user", "content": question})
            by_id = await client.responses.create(input=question, previous_response_id=previous, **body)
            spelled = await client.responses.create(input=items, **body)
            assert by_id.output_text == spelled.output_text
            assert by_id.usage == spelled.usage
            previous = by_id.id
            items += [item.model_dump(exclude_none=True) for item in by_id.output]
            texts += [question, by_id.output_text]
        listed = await client.responses.input_items.list(previous or "", order="asc")
        assert [item.content[0].text for item in listed.data if item.type == "message"] == texts[:-1]  # type: ignore

    talking(tokenizer, work)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "why"}]},
        {"type": "message", "role": "user", "content": "why", "status": "completed", "id": "msg_mine"},
        {"role": "user", "content": [{"type": "input_text", "text": "why"}], "phase": None},
    ],
)
def test_ways_to_say_the_same(tokenizer: Tokenizer, item: Any) -> None:
    same = ask(tokenizer, input=[item], max_output_tokens=4)
    assert same.output_text == ask(tokenizer, max_output_tokens=4).output_text


def test_parts_of_a_content_are_lines_as_in_chats(tokenizer: Tokenizer) -> None:
    parts = [{"type": "input_text", "text": "w"}, {"type": "input_text", "text": "hy"}]
    response = ask(tokenizer, input=[{"role": "user", "content": parts}], max_output_tokens=4)
    assert response.output_text == text_of(tokenizer, [{"role": "user", "content": "w\nhy"}], 4)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(tokenizer: Tokenizer, stream: bool) -> None:
    body = {"model": "parrot", "input": "why", "max_output_tokens": 6, "include": LOGPROBS, "top_logprobs": 2}

    async def work(client: openai.AsyncOpenAI, running: Service) -> Any:
        raw = await running.http.post(RESPONSES, json={**body, "stream": stream})
        if not stream:
            return raw.json(), []
        events = sent_events(raw.content)
        check_order(events)
        for event in events:
            EVENT.validate_python(event)
        return events[-1]["response"], [event for event in events if event["type"] == "response.output_text.delta"]

    response, deltas = talking(tokenizer, work)
    Response.model_validate(response)
    [part] = response["output"][0]["content"]
    wanted = chat(tokenizer, max_completion_tokens=6, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"][
        "content"
    ]
    assert part["logprobs"] == wanted
    assert response["top_logprobs"] == 2
    if stream:
        told = [each for event in deltas for each in event["logprobs"]]
        assert told == wanted[: len(told)]
        assert len(told) >= 3  # the last tokens have no text, so that they come with the end of the text


def test_a_client_that_leaves(tokenizer: Tokenizer) -> None:
    async def work(_: openai.AsyncOpenAI, running: Service) -> None:
        for stream in (True, False):
            body = json.dumps({"input": "why", "stream": stream}).encode()
            visitor = Visitor(running.app, RESPONSES, body)
            await running.steps(5)
            assert len(running.state.responses) == 1
            gone_at = running.core.num_steps
            visitor.leave()
            await running.until_idle()
            assert running.core.aborted_at.pop() <= gone_at + 2
            assert len(running.state.responses) == running.state.responses.num_bytes == 0

    talking(tokenizer, work, step_s=0.001)


def test_a_response_that_fails(tokenizer: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        streamed = asyncio.ensure_future(
            running.http.post(RESPONSES, json={"input": "why", "stream": True, "store": True})
        )
        whole = asyncio.ensure_future(running.http.post(RESPONSES, json={"input": "why"}))
        await running.steps(5)
        running.core.failure = RuntimeError("the device is gone")
        last = sent_events((await streamed).content)[-1]
        EVENT.validate_python(last)
        assert last["type"] == "response.failed"
        assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
        assert "the device is gone" in last["response"]["error"]["message"]
        assert (await client.responses.retrieve(last["response"]["id"])).status == "failed"
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")

    talking(tokenizer, work, step_s=0.001)


def test_an_answer_of_nothing_is_an_empty_message(tokenizer: Tokenizer) -> None:
    text = text_of(tokenizer, [{"role": "user", "content": "why"}])
    response = ask(tokenizer, extra_body={"stop": [text[0]]})
    assert (response.output_text, len(response.output)) == ("", 1)
