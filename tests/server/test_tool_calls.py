"""Tools in /v1/chat/completions, with an engine that says what it is told to, read by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Service, run, service
from tool_templates import LLAMA, MISTRAL, PYTHONIC, QWEN, UNKNOWN, with_template

from noria.text.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ASK = [{"role": "user", "content": "why"}]
CITY = '{"city": "the \\"old\\" mill {1}"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
END = 2


@pytest.fixture(scope="module")
def qwen(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_template(tiny_text_model, QWEN, tmp_path_factory.mktemp("qwen") / "model")


def served(
    tokenizer: Tokenizer,
    said: str,
    work: Callable[[Service, openai.AsyncOpenAI], Awaitable[Any]],
    *,
    burst: int = 1,
    **options: Any,
) -> Any:
    """What `work` makes of a server whose model says that."""

    async def serve() -> Any:
        async with service(tokenizer, max_model_len=4096, **options) as running:
            running.core.say = [*tokenizer.encode(said), END]
            running.core.burst = burst
            client = openai.AsyncOpenAI(
                base_url="http://noria/v1", api_key="x", http_client=running.http, max_retries=0
            )
            return await work(running, client)

    return run(serve())


def asked(tokenizer: Tokenizer, said: str, *, burst: int = 1, options: Any = None, **body: Any) -> tuple[Any, Any]:
    """The answer as a choice, and the same streamed; with the parameters that reached the engine."""

    async def work(running: Service, client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        request: dict[str, Any] = {"model": "parrot", "messages": ASK, "tools": TOOLS, **body}
        whole = await client.chat.completions.create(**request)
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        assert read_chunks(chunks) == read_choice(whole.choices[0])
        return whole.choices[0], running.core.asked[0]

    return served(tokenizer, said, work, burst=burst, **(options or {}))


def read_choice(choice: Any) -> tuple[Any, ...]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    thought = getattr(choice.message, "reasoning", None) or ""
    assert thought == (getattr(choice.message, "reasoning_content", None) or "")
    return choice.message.content or "", thought, calls, choice.finish_reason


def read_chunks(chunks: list[Any]) -> tuple[Any, ...]:
    content = thought = ""
    calls: list[tuple[str, str]] = []
    finish = None
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning", None) or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                assert delta.type == "function"
                assert delta.index == len(calls)
                calls.append((delta.function.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + (delta.function.arguments or ""))
    return content, thought, calls, finish


@pytest.mark.parametrize("burst", [1, 4, 1000])
def test_a_call(qwen: Tokenizer, burst: int) -> None:
    choice, params = asked(qwen, CALL, burst=burst)
    assert read_choice(choice) == ("", "", [("get_weather", CITY)], "tool_calls")
    assert choice.message.content is None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": 'the "old" mill {1}'}
    assert params.structured_outputs is None


def test_text_around_calls_without_arguments(qwen: Tokenizer) -> None:
    said = f'Let me see.\n{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'
    choice, _ = asked(qwen, said)
    assert read_choice(choice) == ("Let me see.", "", [("get_weather", CITY), ("now", "{}")], "tool_calls")
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2


def test_at_most_one_call(qwen: Tokenizer) -> None:
    choice, _ = asked(qwen, f"{CALL}\n{CALL}\n", parallel_tool_calls=False)
    assert read_choice(choice) == ("", "", [("get_weather", CITY)], "tool_calls")


@pytest.mark.parametrize("said", ["no call <tool", '<tool_call>{"name": "now"', "<tool_call>oops</tool_call> ."])
def test_a_near_miss_is_content(qwen: Tokenizer, said: str) -> None:
    choice, _ = asked(qwen, said)
    assert read_choice(choice) == (said, "", [], "stop")


def test_a_call_that_was_cut_off(qwen: Tokenizer) -> None:
    choice, _ = asked(qwen, CALL, max_completion_tokens=len(qwen.encode(CALL)) - 20)
    _, _, [(name, arguments)], finish = read_choice(choice)
    assert (name, finish) == ("get_weather", "length")
    assert CITY.startswith(arguments)


def test_without_tools_nothing_is_a_call(qwen: Tokenizer) -> None:
    for body in ({"tools": []}, {"tool_choice": "none"}):
        choice, params = asked(qwen, CALL, **body)
        assert read_choice(choice) == (CALL, "", [], "stop")
        assert params.structured_outputs is None


def test_several_answers(qwen: Tokenizer) -> None:
    async def work(running: Service, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="parrot", messages=ASK, tools=TOOLS, n=3)  # type: ignore
        assert [read_choice(choice) for choice in answer.choices] == [
            ("", "", [("get_weather", CITY)], "tool_calls")
        ] * 3

    served(qwen, CALL, work)


@pytest.mark.parametrize(
    ("template", "special", "said"),
    [
        (LLAMA, (), f'{{"name": "get_weather", "parameters": {CITY}}}'),
        (MISTRAL, (), f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}]'),
        (MISTRAL, ("[TOOL_CALLS]",), f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}]'),
        (PYTHONIC, (), "[get_weather(city='the \"old\" mill {1}')]"),
        (QWEN, ("<|user|>", "<tool_call>", "</tool_call>"), CALL),
    ],
)
def test_other_formats(
    tiny_text_model: Path, tmp_path: Path, template: str, special: tuple[str, ...], said: str
) -> None:
    tokenizer = with_template(tiny_text_model, template, tmp_path / "model", special)
    choice, params = asked(tokenizer, said)
    assert read_choice(choice) == ("", "", [("get_weather", CITY)], "tool_calls")
    assert params.skip_special_tokens == (not special)


def test_the_format_can_be_chosen(qwen: Tokenizer) -> None:
    said = '{"name": "now", "parameters": {}}'
    choice, _ = asked(qwen, said, options={"tool_call_parser": "llama3_json"})
    assert read_choice(choice) == ("", "", [("now", "{}")], "tool_calls")


def prompt_of(tokenizer: Tokenizer, **body: Any) -> str:
    async def work(running: Service, client: openai.AsyncOpenAI) -> str:
        request = {"messages": ASK, **body}
        tokens = (await running.http.post("/tokenize", json=request)).json()["tokens"]
        chat = await running.http.post("/v1/chat/completions", json={**request, "return_token_ids": True})
        assert chat.json()["choices"][0]["prompt_token_ids"] == tokens
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return served(tokenizer, "x", work)


def test_the_template_is_given_tools_and_calls(qwen: Tokenizer) -> None:
    calls = [
        {"id": "1", "type": "function", "index": 0, "function": {"name": "get_weather", "arguments": '{"city":"x"}'}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
        {"id": "3", "type": "function", "function": {"name": "now", "arguments": '{"a": oops'}},
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    prompt = prompt_of(qwen, messages=messages, tools=TOOLS)
    for tool in TOOLS:
        shown = {"parameters": {"type": "object", "properties": {}}, **tool["function"]}  # type: ignore[dict-item]
        found = json.JSONDecoder().raw_decode(
            prompt, prompt.index(f'{{"type": "function", "function": {{"name": "{shown["name"]}"')
        )
        assert found[0] == {"type": "function", "function": shown}
    for part in (
        '<|assistant|><think>hm</think><tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": oops"}</tool_call><|end|>',
        "<|user|>rain<|end|><|assistant|>",
    ):
        assert part in prompt


def test_a_template_that_takes_arguments_as_text(tiny_text_model: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny_text_model, LLAMA, tmp_path / "model")
    calls = [{"id": "1", "function": {"name": "now", "arguments": '{"a":1}'}}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert prompt_of(tokenizer, messages=messages).endswith('assistant: {"a":1}!tool: x')


@pytest.mark.parametrize(
    ("choice", "begins"),
    [
        (
            "required",
            ['<tool_call>\n{"name": "get_weather", "arguments": ', '<tool_call>\n{"name": "now", "arguments": '],
        ),
        ({"type": "function", "function": {"name": "now"}}, ['<tool_call>\n{"name": "now", "arguments": ']),
    ],
)
def test_a_call_that_is_forced(qwen: Tokenizer, choice: Any, begins: list[str]) -> None:
    answer, params = asked(qwen, CALL, tool_choice=choice, options={"reasoning_parser": "none"})
    assert read_choice(answer)[-1] == "tool_calls"
    [tags] = json.loads(params.structured_outputs.structural_tag)["format"]["elements"]
    assert [tag["begin"] for tag in tags["tags"]] == begins
    assert tags["at_least_one"]
    assert tags["stop_after_first"] == (choice != "required")
    schemas = [tag["content"]["json_schema"] for tag in tags["tags"]]
    assert schemas[-1] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert len(begins) == 1 or schemas[0] == WEATHER["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize("template", [PYTHONIC, UNKNOWN])
def test_a_forced_call_of_a_model_whose_format_is_of_no_use(
    tiny_text_model: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = with_template(tiny_text_model, template, tmp_path / "model")
    said = f'[{{"name": "get_weather", "parameters": {CITY}}}, {{"name": "now", "parameters": {{}}}}]'
    answer, params = asked(tokenizer, said, tool_choice="required")
    assert read_choice(answer) == ("", "", [("get_weather", CITY), ("now", "{}")], "tool_calls")
    assert params.structured_outputs.kind == "structural_tag"


def test_strict_tools(qwen: Tokenizer) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    _, params = asked(qwen, CALL, tools=[strict, NOW], options={"reasoning_parser": "none"})
    node = json.loads(params.structured_outputs.structural_tag)["format"]
    assert node["triggers"] == ["<tool_call>"]
    assert [tag["content"]["json_schema"] for tag in node["tags"]] == [
        WEATHER["function"]["parameters"],  # type: ignore[index]
        {"type": "object"},
    ]


def test_a_response_format_leaves_room_for_calls_and_thoughts(qwen: Tokenizer) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer, params = asked(qwen, CALL, response_format=response_format)
    assert read_choice(answer)[-1] == "tool_calls"
    thinking, direct = json.loads(params.structured_outputs.structural_tag)["format"]["elements"]
    assert [each["type"] for each in thinking["elements"]] == [
        "const_string",
        "any_text",
        "const_string",
        "regex",
        "or",
    ]
    assert direct == thinking["elements"][-1]
    assert direct["elements"][-1] == {"type": "json_schema", "json_schema": {"type": "object"}}
    _, params = asked(qwen, "{}", tools=[], response_format=response_format, options={"reasoning_parser": "none"})
    assert params.structured_outputs.kind == "json"


THOUGHT = "I <b> need\nit"


@pytest.mark.parametrize("burst", [1, 4, 1000])
def test_reasoning(qwen: Tokenizer, burst: int) -> None:
    for thinking, said in ((False, f"<think>\n{THOUGHT}\n</think>\n\nSo "), (True, f"\n{THOUGHT}\n</think>\n\nSo ")):
        kwargs = {"chat_template_kwargs": {"thinking": thinking}}
        choice, _ = asked(qwen, said, burst=burst, tools=[], extra_body=kwargs)
        assert read_choice(choice) == ("So ", THOUGHT, [], "stop")
        choice, _ = asked(qwen, said + CALL, burst=burst, extra_body=kwargs)
        assert read_choice(choice) == ("So", THOUGHT, [("get_weather", CITY)], "tool_calls")
        choice, _ = asked(qwen, said, burst=burst, extra_body={**kwargs, "include_reasoning": False})
        assert read_choice(choice) == ("So ", "", [], "stop")


def test_reasoning_alone(qwen: Tokenizer) -> None:
    choice, _ = asked(qwen, "<think>hm", tools=[])
    assert read_choice(choice) == ("", "hm", [], "stop")
    assert choice.message.content is None
    choice, _ = asked(qwen, "<think>hm</think>so", tools=[], options={"reasoning_parser": "none"})
    assert read_choice(choice) == ("<think>hm</think>so", "", [], "stop")
    choice, _ = asked(qwen, "hm</think>so", tools=[], options={"reasoning_parser": "deepseek_r1"})
    assert read_choice(choice) == ("so", "hm", [], "stop")


def refusal(tokenizer: Tokenizer, options: Any = None, **body: Any) -> tuple[str, str | None]:
    async def work(running: Service, client: openai.AsyncOpenAI) -> tuple[str, str | None]:
        bad = {"messages": ASK, "tools": TOOLS, **body}
        good = asyncio.ensure_future(running.http.post("/v1/chat/completions", json={"messages": ASK}))
        response = await running.http.post("/v1/chat/completions", json=bad)
        assert response.status_code == 400, response.text
        assert (await good).json()["choices"][0]["message"]["content"] == "fine"
        error = response.json()["error"]
        assert "\n" not in error["message"]
        return error["message"], error["param"]

    return served(tokenizer, "fine", work, **(options or {}))


def test_what_the_server_cannot_do(
    tiny_text_model: Path, tmp_path: Path, tokenizer: Tokenizer, qwen: Tokenizer
) -> None:
    message, param = refusal(tokenizer, tool_choice="required")
    assert "the chat template of this model has no place for tools" in message
    assert param == "tools"
    unknown = with_template(tiny_text_model, UNKNOWN, tmp_path / "unknown")
    message, param = refusal(unknown)
    assert "--tool-call-parser" in message
    assert param == "tool_choice"
    message, _ = refusal(qwen, {"tool_call_parser": "none"})
    assert "--tool-call-parser" in message
    message, param = refusal(qwen, {"enable_auto_tool_choice": False}, tool_choice="auto")
    assert "--no-enable-auto-tool-choice" in message
    llama = with_template(tiny_text_model, LLAMA, tmp_path / "llama")
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    message, param = refusal(llama, tools=[NOW, strict])
    assert "strict is not possible with the tool format llama3_json" in message
    assert param == "tools[1].function.strict"
    message, _ = refusal(qwen, tool_choice="required", response_format={"type": "json_object"})
    assert "leaves no room for structured output (json_object)" in message
    message, _ = refusal(qwen, structured_outputs={"grammar": 'start: "a"'})
    assert "tools and structured output (grammar) do not go together" in message


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def schema(**parameters: Any) -> dict[str, Any]:
    return {"tools": [tool(parameters={"type": "object", "properties": {"x": parameters}})]}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"tools": {}}, "tools: ", "tools"),
        ({"tools": [5]}, "tools[0]: ", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing", "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: ", "tools[0].type"),
        ({"tools": [tool(name="")]}, "the name of a function must be 1 to 64", "tools[0].function"),
        ({"tools": [tool(name="a b")]}, "the name of a function must be 1 to 64", "tools[0].function"),
        ({"tools": [tool(name="a" * 65)]}, "the name of a function must be 1 to 64", "tools[0].function"),
        ({"tools": [tool(), tool()]}, "tools: 2 of them have the name 'f'", "tools"),
        ({"tools": [tool(colour=1)]}, "tools[0].function.colour is not supported", "tools[0].function.colour"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict: ", "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters: ", "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, 'must have the type "object"', "tools[0].function"),
        ({"tools": [tool(parameters={"properties": 5})]}, "parameters is no JSON schema: properties", None),
        (schema(type="text"), "parameters.properties.x is no JSON schema: there is no type 'text'", None),
        (schema(type=5), "there is no type '5'", None),
        (schema(type=[]), "there is no type '[]'", None),
        (schema(type=["string", {}]), "there is no type '{}'", None),
        (schema(items=[{"enum": []}]), "parameters.properties.x.items[0] is no JSON schema: enum", None),
        (schema(anyOf={}), "anyOf must be a list", None),
        (schema(anyOf=["string"]), "parameters.properties.x.anyOf[0] is no JSON schema: it must be an object", None),
        (schema(required="x"), "required must be a list of names", None),
        (schema(additionalProperties="no"), "x.additionalProperties is no JSON schema", None),
        ({"tool_choice": "sometimes"}, "tool_choice 'sometimes' is not supported", "tool_choice"),
        ({"tool_choice": 5}, "tool_choice '5' is not supported", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "is not supported; it must be none, auto", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "is not supported", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "zzz"}}},
            "tool_choice: there is no tool 'zzz'; add it to tools",
            "tool_choice",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: ", "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning: ", "include_reasoning"),
        ({"functions": [{"name": "f"}]}, "functions is not supported", "functions"),
    ],
)
def test_bad_tools(qwen: Tokenizer, body: dict[str, Any], message: str, param: str | None) -> None:
    told, about = refusal(qwen, **body)
    assert message in told
    if param is not None:
        assert about == param


def called(**call: Any) -> dict[str, Any]:
    whole = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return {"role": "assistant", "tool_calls": [{name: value for name, value in whole.items() if value is not None}]}


@pytest.mark.parametrize(
    ("message", "told", "param"),
    [
        (called(id=None), "tool_calls[0].id is missing", "messages[0].tool_calls[0].id"),
        (called(type="custom"), "messages[0].tool_calls[0].type: ", "messages[0].tool_calls[0].type"),
        (called(function={"name": "f"}), "function.arguments is missing", None),
        (called(function={"name": "f", "arguments": {}}), "function.arguments: ", None),
        (called(function={"name": "", "arguments": ""}), "function.name: ", None),
        ({"role": "assistant", "tool_calls": "x", "content": ""}, "messages[0].tool_calls: ", None),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content is missing", "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content is missing", "messages[0].content"),
        ({**called(), "role": "user"}, "tool_calls is for messages of the role assistant", "messages[0]"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning is for messages of the role", "messages[0]"),
        ({"role": "tool", "content": "x"}, "the role tool, and no other, must have a tool_call_id", "messages[0]"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "the role tool, and no other", "messages[0]"),
        (
            {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"},
            "reasoning_content is the older name of reasoning",
            "messages[0]",
        ),
    ],
)
def test_bad_messages(qwen: Tokenizer, message: dict[str, Any], told: str, param: str | None) -> None:
    found, about = refusal(qwen, messages=[message])
    assert told in found
    if param is not None:
        assert about == param


def test_schemas_as_people_write_them_are_accepted(qwen: Tokenizer) -> None:
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "A"},
            "b": {"type": ["integer", "null"], "minimum": 0},
            "c": {"$ref": "#/$defs/C"},
            "d": True,
            "e": {"type": "array", "items": {"enum": [1, "x"]}},
        },
        "$defs": {"C": {"type": "object", "additionalProperties": {"type": "number"}, "required": []}},
        "additionalProperties": False,
    }
    choice, _ = asked(qwen, '<tool_call>{"name": "f"}</tool_call>', tools=[tool(parameters=parameters)])
    assert read_choice(choice)[2] == [("f", "{}")]
    deep: dict[str, Any] = {}
    for _ in range(101):
        deep = {"type": "object", "properties": {"x": deep}}
    assert "nested deeper than 100" in refusal(qwen, tools=[tool(parameters=deep)])[0]
