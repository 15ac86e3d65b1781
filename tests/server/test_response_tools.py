"""Function calls, thoughts and formats in /v1/responses, with an engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Service
from openai.types.responses import Response
from responses_client import RESPONSES, check_order, sent_events, strict, talking
from test_refusals import error_of
from tool_templates import QWEN, with_template

from noria.errors import RequestError
from noria.text.tokenizer import Tokenizer

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"type": "function", "name": "now"}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
    for tool in (WEATHER, NOW)
]
BODY: Any = {"model": "parrot", "input": "why", "tools": [WEATHER, NOW]}
CITY = '{"city": "the \\"old\\" mill {1}"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
CALL_NOW = '<tool_call>{"name": "now"}</tool_call>'
END = 2


@pytest.fixture(scope="module")
def qwen(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_template(tiny_text_model, QWEN, tmp_path_factory.mktemp("qwen") / "model")


Work = Callable[[openai.AsyncOpenAI, Service], Awaitable[Any]]


def saying(tokenizer: Tokenizer, said: str, work: Work, *, burst: int = 1, **options: Any) -> Any:
    async def begin(client: openai.AsyncOpenAI, running: Service) -> Any:
        running.core.say = [*tokenizer.encode(said), END]
        running.core.burst = burst
        return await work(client, running)

    return talking(tokenizer, begin, max_model_len=4096, **options)


def answered(tokenizer: Tokenizer, said: str, *, burst: int = 1, options: Any = None, **body: Any) -> Response:
    """The whole response, which is the one that is streamed."""

    async def work(client: openai.AsyncOpenAI, running: Service) -> Response:
        whole = strict(await client.responses.create(**{**BODY, **body}))
        events = sent_events((await running.http.post(RESPONSES, json={**BODY, **body, "stream": True})).content)
        check_order(events)
        streamed = Response.model_validate(events[-1]["response"])
        assert [said_in(item) for item in streamed.output] == [said_in(item) for item in whole.output]
        assert (streamed.status, streamed.usage) == (whole.status, whole.usage)
        return whole

    return saying(tokenizer, said, work, burst=burst, **(options or {}))


def said_in(item: Any) -> tuple[str, ...]:
    if item.type == "function_call":
        return (item.name, item.arguments)
    return (item.type, *(part.text for part in item.content))


@pytest.mark.parametrize("burst", [1, 4, 1000])
def test_a_call(qwen: Tokenizer, burst: int) -> None:
    response = answered(qwen, f"Let me see.\n{CALL}\n{CALL_NOW}", burst=burst)
    assert [said_in(item) for item in response.output] == [
        ("message", "Let me see."),
        ("get_weather", CITY),
        ("now", "{}"),
    ]
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert {item.status for item in calls} == {"completed"}
    assert response.status == "completed"
    assert [tool.to_dict()["name"] for tool in response.tools] == ["get_weather", "now"]


def test_a_call_that_was_cut_off(qwen: Tokenizer) -> None:
    response = answered(qwen, CALL, max_output_tokens=len(qwen.encode(CALL)) - 20)
    [call] = response.output
    assert call.type == "function_call"
    assert CITY.startswith(call.arguments)
    assert (call.status, response.status) == ("incomplete", "incomplete")


def test_at_most_one_call(qwen: Tokenizer) -> None:
    response = answered(qwen, f"{CALL}\n{CALL_NOW}", parallel_tool_calls=False)
    assert [said_in(item) for item in response.output] == [("get_weather", CITY)]
    assert response.parallel_tool_calls is False


def test_without_tools_nothing_is_a_call(qwen: Tokenizer) -> None:
    nothing: Any = ({"tools": []}, {"tool_choice": "none"})
    for body in nothing:
        [message] = answered(qwen, CALL, **body).output
        assert said_in(message) == ("message", CALL)


@pytest.mark.parametrize(
    ("choice", "as_chat"),
    [
        ("required", "required"),
        ({"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_a_choice_is_enforced_as_in_chats(qwen: Tokenizer, choice: Any, as_chat: Any) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        response = await client.responses.create(**BODY, tool_choice=choice)
        messages: Any = [{"role": "user", "content": "why"}]
        await client.chat.completions.create(model="parrot", messages=messages, tools=CHAT_TOOLS, tool_choice=as_chat)
        ours, theirs = running.core.asked
        assert ours.structured_outputs is not None
        assert ours.structured_outputs == theirs.structured_outputs
        assert said_in(response.output[0]) == ("now", "{}")
        assert response.model_dump()["tool_choice"] == choice

    saying(qwen, CALL_NOW, work)


def test_the_results_of_calls_go_on(qwen: Tokenizer) -> None:
    """By id as spelled out, and as the chat with the same messages."""

    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        first = await client.responses.create(**BODY)
        thought, message, call = first.output
        assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}  # type: ignore[union-attr]
        by_id = await client.responses.create(**{**BODY, "input": [result]}, previous_response_id=first.id)
        given = [{"role": "user", "content": "why"}, *(item.to_dict() for item in first.output), result]
        spelled = await client.responses.create(**{**BODY, "input": given})
        assert by_id.usage == spelled.usage
        function = {"name": "get_weather", "arguments": CITY}
        turn = {"role": "assistant", "content": "so:", "reasoning_content": "hm"}
        called = {"id": call.call_id, "type": "function", "function": function}  # type: ignore[union-attr]
        messages = [
            {"role": "user", "content": "why"},
            {**turn, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},  # type: ignore[union-attr]
        ]
        tools = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in BODY["tools"]
        ]
        chat = {"model": "parrot", "messages": messages, "tools": tools}
        usage = (await running.http.post("/v1/chat/completions", json=chat)).json()["usage"]
        assert by_id.usage is not None
        assert by_id.usage.input_tokens == usage["prompt_tokens"]
        bad = {**BODY, "input": [{**result, "call_id": "other"}], "previous_response_id": first.id}
        assert "has the call_id 'other'" in error_of(await running.http.post(RESPONSES, json=bad))["message"]

    saying(qwen, f"<think>hm</think>so:{CALL}", work, reasoning_parser="qwen3")


def test_thoughts_are_items_and_counted(qwen: Tokenizer) -> None:
    said = "<think>the river runs</think>down"
    response = answered(qwen, said, options={"reasoning_parser": "qwen3"}, tools=[])
    assert [said_in(item) for item in response.output] == [("reasoning", "the river runs"), ("message", "down")]
    usage = response.usage
    assert usage is not None
    reasoning = usage.output_tokens_details.reasoning_tokens
    assert len(qwen.encode("the river runs")) <= reasoning < usage.output_tokens
    cut = answered(qwen, said, options={"reasoning_parser": "qwen3"}, tools=[], max_output_tokens=8)
    assert [item.type for item in cut.output] == ["reasoning"]
    assert cut.usage is not None
    assert cut.usage.output_tokens_details.reasoning_tokens == 8
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT: Any = {"type": "json_schema", "name": "mill", "schema": SCHEMA, "strict": True}


def test_formats_are_those_of_chats(qwen: Tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        body: Any = {"model": "parrot", "input": "why"}
        response = strict(await client.responses.create(**body, text={"format": FORMAT}))
        assert response.text is not None
        assert response.to_dict(exclude_none=True)["text"] == {"format": FORMAT}
        await client.responses.create(**body, text={"format": {"type": "json_object"}})
        await client.responses.create(**body, text={"format": {"type": "text"}})
        await client.responses.create(**body, extra_body={"structured_outputs": {"choice": ["x", "y"]}})
        schema, any_object, free, choice = [params.structured_outputs for params in running.core.asked]
        assert json.loads(schema.json) == SCHEMA  # type: ignore[union-attr, arg-type]
        assert any_object.json_object is True  # type: ignore[union-attr]
        assert free is None
        assert choice.choice == ("x", "y")  # type: ignore[union-attr]
        both = {**body, "text": {"format": FORMAT}, "structured_outputs": {"choice": ["x"]}}
        error = error_of(await running.http.post(RESPONSES, json=both))
        assert "text.format" in error["message"]
        assert "response_format" not in error["message"]

    saying(qwen, '{"a": 1}', work, reasoning_parser="none")


def test_the_client_parses_what_it_asked_for(qwen: Tokenizer) -> None:
    from pydantic import BaseModel

    class Mill(BaseModel):
        a: int

    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        parsed = await client.responses.parse(model="parrot", input="why", text_format=Mill)
        assert parsed.output_parsed == Mill(a=1)
        async with client.responses.stream(model="parrot", input="why", text_format=Mill) as stream:
            assert (await stream.get_final_response()).output_parsed == Mill(a=1)
        assert all(params.structured_outputs is not None for params in running.core.asked)

    saying(qwen, '{"a": 1}', work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_refused_while_it_is_compiled(
    qwen: Tokenizer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> Any:
        raise RequestError("response_format: it is too large")
        yield

    async def work(client: openai.AsyncOpenAI, running: Service) -> None:
        monkeypatch.setattr("noria.server.generation.run", refuse)
        answer = await running.http.post(RESPONSES, json={"input": "why", "stream": stream})
        if not stream:
            assert error_of(answer)["message"] == "text.format: it is too large"
            return
        error = sent_events(answer.content)[-1]["response"]["error"]
        assert error == {"code": "invalid_prompt", "message": "text.format: it is too large"}

    saying(qwen, "x", work)


def test_what_this_model_cannot_do_is_said_in_the_names_of_responses(tokenizer: Tokenizer, qwen: Tokenizer) -> None:
    async def refused(_: openai.AsyncOpenAI, running: Service) -> str:
        return error_of(await running.http.post(RESPONSES, json=BODY))["param"]

    assert saying(tokenizer, "x", refused) == "tools"  # this template has no place for them
    bad = {**BODY, "tools": [{**WEATHER, "name": "a b"}]}

    async def named(_: openai.AsyncOpenAI, running: Service) -> str:
        return error_of(await running.http.post(RESPONSES, json=bad))["param"]

    assert saying(qwen, "x", named) == "tools[0]"
