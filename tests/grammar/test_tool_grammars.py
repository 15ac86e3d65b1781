"""What makes a model call: the grammars of tool choices and strict tools, written character by character."""

from __future__ import annotations

from typing import Any

import pytest
from grammars import begin, write

from noria.config import StructuredOutputsParams
from noria.text.reasoning.formats import REASONING_FORMATS
from noria.text.tools.forced import FORCED_SPELLING
from noria.text.tools.formats import TOOL_PARSERS
from noria.text.tools.structure import Node, Spelling, Tool, after_reasoning, calls, either, text_with_calls

CITY: Node = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED = (Tool("get_weather", CITY, strict=True), Tool("now", None))


def spelling(name: str, template: str = "") -> Spelling:
    found = TOOL_PARSERS[name].spelling(template)
    assert found is not None
    return found


SPELLINGS = {
    "hermes": spelling("hermes"),
    "llama3_json": spelling("llama3_json"),
    "mistral": spelling("mistral"),
    "mistral with names": spelling("mistral", "[ARGS]"),
    "forced": FORCED_SPELLING,
}
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ('{"name": "get_weather", "parameters": {"city": "Rome"}}', '{"name": "now", "parameters": {}}'),
    "mistral": ('{"name": "get_weather", "arguments": {"city": "Rome"}}', '{"name": "now", "arguments": {}}'),
    "mistral with names": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', "[TOOL_CALLS]now[ARGS]{}"),
    "forced": ('{"name": "get_weather", "parameters": {"city": "Rome"}}', '{"name": "now", "parameters": {}}'),
}


def outcome(node: Node, text: str) -> str | None:
    return write(begin(StructuredOutputsParams(structural_tag={"format": dict(node)})), text)


@pytest.mark.parametrize("name", SPELLINGS)
def test_calls(name: str) -> None:
    spelled, (weather, now) = SPELLINGS[name], CALLS[name]
    many, one = calls(spelled, ASKED, parallel=True), calls(spelled, ASKED, parallel=False)
    for texts in ([weather], [now], [now, weather, now]):
        whole = spelled.before + spelled.between.join(texts) + spelled.after
        assert outcome(many, whole) == ("must end" if spelled.after else "may end")
    for text in (weather, now):
        assert outcome(one, spelled.before + text + spelled.after) == "must end"
    assert outcome(many, "x") == "refused x"
    assert outcome(many, spelled.before) == "more"
    for wrong in (now.replace("now", "nope"), weather.replace("Rome", "Bonn"), now.replace("{}", '{"a": 1}')):
        refused = outcome(many, spelled.before + wrong)
        assert refused is not None
        assert refused.startswith("refused ")


@pytest.mark.parametrize("name", [name for name, spelled in SPELLINGS.items() if spelled.trigger])
def test_strict_tools_in_text(name: str) -> None:
    node, (weather, now) = text_with_calls(SPELLINGS[name], ASKED), CALLS[name]
    for text in ("no call", f"so {weather}", f"{now} and {weather}\n{now} well"):
        assert outcome(node, text) == "may end"
    assert outcome(node, now.replace("{}", '{"a": 1}')) == "may end"  # that tool is not strict
    assert str(outcome(node, f"so {weather}".replace("Rome", "Bonn"))).startswith("refused ")


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("begun", "hm </thi\n</think>\n\nCALL", "may end"),
        ("begun", "hm", "more"),
        ("begun", "hm</think>\nx", "refused x"),
        ("maybe", "<think>hm</think>CALL", "may end"),
        ("maybe", "CALL", "may end"),
        ("never", "CALL", "may end"),
        ("never", "<think>", "refused hink>"),
    ],
)
def test_what_is_forced_comes_after_what_is_thought(thinking: Any, text: str, expected: str) -> None:
    node = after_reasoning(calls(SPELLINGS["hermes"], ASKED, parallel=True), REASONING_FORMATS["qwen3"], thinking)
    assert outcome(node, text.replace("CALL", CALLS["hermes"][0])) == expected


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("begun", "hm <tool_call> x</think>so CALL", "may end"),
        ("begun", "hm <tool_call>", "more"),
        ("begun", "hm</think>so WRONG", "refused Bonn"),
        ("maybe", "<think>hm <tool_call></think>", "refused </think>"),  # free text, as far as the grammar can know
        ("maybe", "<think>hm</think>so CALL", "may end"),
        ("maybe", "<think>hm</think>so WRONG", "refused Bonn"),
        ("maybe", "so CALL and CALL", "may end"),
        ("maybe", "so", "may end"),
        ("maybe", "so WRONG", "refused Bonn"),
    ],
)
def test_strict_tools_of_a_model_that_thinks(thinking: Any, text: str, expected: str) -> None:
    node = after_reasoning(text_with_calls(SPELLINGS["hermes"], ASKED), REASONING_FORMATS["qwen3"], thinking)
    call = CALLS["hermes"][0]
    found = outcome(node, text.replace("CALL", call).replace("WRONG", call.replace("Rome", "Bonn")))
    assert str(found).startswith(expected)


@pytest.mark.parametrize("name", [name for name, spelled in SPELLINGS.items() if not spelled.looks_like_json])
def test_calls_or_an_answer_of_a_given_form(name: str) -> None:
    for schema, good, bad in ((CITY, '{"city": "Paris"}', '{"town"'), ({"type": "array"}, '[1, "TOOL"]', "[TOOK")):
        answer = {"type": "json_schema", "json_schema": dict(schema)}
        spelled = SPELLINGS[name]
        node = either(calls(spelled, ASKED, parallel=False), answer)
        for text in (spelled.before + CALLS[name][0] + spelled.after, good):
            assert outcome(node, text) == "must end"
        assert str(outcome(node, bad)).startswith("refused ")


def test_schemas_as_libraries_write_them() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Where",
        "description": "of the weather",
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Place", "description": "where"},
            "days": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None, "title": "Days"},
        },
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = (Tool("a", schema), Tool("b", schema))
    node = calls(SPELLINGS["hermes"], tools, parallel=False)
    call = '<tool_call>\n{"name": "b", "arguments": {"at": {"x": 1.5}, "days": DAYS}}\n</tool_call>'
    assert outcome(node, call.replace("DAYS", "null")) == "must end"
    assert str(outcome(node, call.replace("DAYS", "0"))).startswith("refused ")


def test_which_calls_look_like_json() -> None:
    assert {name for name, spelled in SPELLINGS.items() if spelled.looks_like_json} == {"llama3_json", "forced"}
