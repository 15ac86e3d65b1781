"""Tool calls of a real server on a tiny model, driven by the official client: the weights are random, so every call is
the grammar's work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess
from tool_templates import with_template

SHORT = """
{%- if tools %}{{ '<|user|>' }}{% for tool in tools %}{{ tool.function.name }} {% endfor %}
{{- 'in <tool_call></tool_call><|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "why"}], "tools": TOOLS, "temperature": 0}


@pytest.fixture(scope="module")
def client(
    tiny_text_model: Path, small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tools")
    with_template(tiny_text_model, SHORT, folder / "model")
    with ServerProcess(folder / "model", folder / "log", *small, "--served-model-name", "tiny") as server:
        server.wait_ready()
        with server.client() as client:
            yield client
        assert server.metric("compiles_after_warmup_total") == 0
    assert "Traceback" not in (folder / "log").read_text()


def check_calls(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name in names
        if call.function.name == "now":
            assert arguments == {}
        else:
            assert arguments.keys() == {"city", "days"}
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_forced_calls_follow_their_schemas(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    asked = {**ASK, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    check_calls(whole.message.tool_calls, names)
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    with client.chat.completions.stream(**asked) as stream:
        pieces = [each.arguments_delta for each in stream if each.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    [call], [same] = whole.message.tool_calls or (), streamed.message.tool_calls or ()
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)  # type: ignore[union-attr]
    assert "".join(pieces) == call.function.arguments  # type: ignore[union-attr]
    assert streamed.finish_reason == "tool_calls"


def test_seeded_calls_of_several_answers(client: openai.OpenAI) -> None:
    asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "n": 4, "seed": 5}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    for choice, again in zip(first.choices, second.choices, strict=True):
        check_calls(choice.message.tool_calls, {"get_weather", "now"})
        [one], [same] = choice.message.tool_calls or (), again.message.tool_calls or ()
        assert one.function == same.function  # type: ignore[union-attr]


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages = [*ASK["messages"], message.to_dict(), answer]
    last = client.chat.completions.create(**{**ASK, "messages": messages, "tool_choice": "none", "max_tokens": 5})
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].message.tool_calls is None
