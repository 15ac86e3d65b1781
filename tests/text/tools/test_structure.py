"""What structured output is told to make the model write is what the parser of the format reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from tool_texts import TOOLS, read

from noria.text.reasoning.formats import REASONING_FORMATS
from noria.text.tools.base import ToolParser
from noria.text.tools.forced import ForcedParser
from noria.text.tools.formats import TOOL_PARSERS
from noria.text.tools.structure import Tool, after_reasoning, calls, either, text_with_calls

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = (Tool("get_weather", CITY), Tool("now", None))
SPELLED = [
    (kind, template)
    for kind in (*TOOL_PARSERS.values(), ForcedParser)
    for template in ("", "[ARGS]")
    if kind.spelling(template) is not None
]


def written(node: Mapping[str, Any]) -> list[str]:
    """Some texts that a structure allows."""
    match node["type"]:
        case "const_string":
            return [node["value"]]
        case "json_schema":
            return ['{"city": "Paris"}' if node["json_schema"] == CITY else "{}"]
        case "regex":
            return ["\n\n"]
        case "any_text":
            return ["Hm, <tool_call> [TOOL_CALLS]"]
        case "tag":
            return [node["begin"] + text + node["end"] for text in written(node["content"])]
        case "sequence":
            return ["".join(parts) for parts in itertools.product(*map(written, node["elements"]))]
        case "or":
            return [text for each in node["elements"] for text in written(each)]
        case "tags_with_separator":
            each = [text for tag in node["tags"] for text in written(tag)]
            return each if node["stop_after_first"] else [*each, node["separator"].join(each)]
        case "triggered_tags":
            return [f"so {text}" for tag in node["tags"] for text in written(tag)]
        case kind:
            raise AssertionError(kind)


@pytest.mark.parametrize(("kind", "template"), SPELLED)
def test_calls(kind: type[ToolParser], template: str) -> None:
    spelling = kind.spelling(template)
    assert spelling is not None
    weather, now = ("get_weather", '{"city": "Paris"}'), ("now", "{}")
    for parallel, expected in ((True, [[weather], [now], [weather, now]]), (False, [[weather], [now]])):
        texts = written(calls(spelling, ASKED, parallel=parallel))
        found = [read(kind(TOOLS), [text]) for text in texts]
        assert [(each.content, each.calls) for each in found] == [("", each) for each in expected]


@pytest.mark.parametrize(("kind", "template"), SPELLED)
def test_a_trigger_is_what_a_call_begins_with(kind: type[ToolParser], template: str) -> None:
    spelling = kind.spelling(template)
    assert spelling is not None
    if spelling.trigger:
        assert spelling.begin.startswith(spelling.trigger)
        for text in written(text_with_calls(spelling, ASKED)):
            found = read(kind(TOOLS), [text])
            assert found.content == "so"
            assert len(found.calls) == 1


def test_only_strict_tools_are_held_to_their_schema_when_nobody_forces_them() -> None:
    spelling = TOOL_PARSERS["hermes"].spelling("")
    assert spelling is not None
    tags = text_with_calls(spelling, (Tool("a", CITY, strict=True), Tool("b", CITY)))["tags"]
    assert [tag["content"]["json_schema"] for tag in tags] == [CITY, {"type": "object"}]


@pytest.mark.parametrize("prompt", ["assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"])
def test_structure_is_for_the_answer_and_not_for_what_is_thought(prompt: str) -> None:
    reasoning = REASONING_FORMATS["qwen3"]
    answer = {"type": "const_string", "value": json.dumps({"a": 1})}
    node = after_reasoning(either(answer), reasoning, reasoning.thinking(prompt))
    texts = written(node)
    assert texts
    for text in texts:
        parser = reasoning.parser(prompt)
        content = [delta for delta in [*parser.push(text), *parser.finish()] if "{" in getattr(delta, "text", "")]
        assert content[-1].text == answer["value"]
    assert after_reasoning(answer, None, "never") == answer


def test_pythonic_calls_are_not_json() -> None:
    assert TOOL_PARSERS["pythonic"].spelling("") is None
