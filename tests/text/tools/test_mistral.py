from __future__ import annotations

import pytest
from tool_texts import TOOLS, read_whole

from noria.text.deltas import CallDelta
from noria.text.tools.mistral import MistralParser

NOW = '{"name": "now", "arguments": {}}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "[TOOL_CALLS]", "n": "]"}}'
CITY = '{"city": "[TOOL_CALLS]", "n": "]"}'


def test_an_array_of_calls() -> None:
    for text in (f"[TOOL_CALLS][{NOW}, {WEATHER}]", f"\n[TOOL_CALLS] [ {NOW} ,{WEATHER}\n]\n"):
        found = read_whole(MistralParser, text)
        assert (found.content, found.calls) == ("", [("now", "{}"), ("get_weather", CITY)])


@pytest.mark.parametrize("middle", ["[ARGS]", "", "[ARGS] ", "[CALL_ID]abc123XYZ[ARGS]"])
def test_names_and_arguments(middle: str) -> None:
    found = read_whole(MistralParser, f"[TOOL_CALLS]now{middle}{{}}[TOOL_CALLS]geo.find{middle}{CITY}")
    assert (found.content, found.calls) == ("", [("now", "{}"), ("geo.find", CITY)])


def test_ids_are_such_as_its_templates_take() -> None:
    parser = MistralParser(TOOLS)
    deltas = parser.push(f"[TOOL_CALLS][{NOW}, {NOW}][TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{{}}")
    ids = [delta.id for delta in deltas if isinstance(delta, CallDelta) and delta.id]
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert ids[2] == "abc123XYZ"


def test_text_before_and_after() -> None:
    found = read_whole(MistralParser, f"Well [TOOL_CALLS][{NOW}] then [TOOL_CALLS]now[ARGS]{{}} end")
    assert (found.content, found.calls) == ("Wellthenend", [("now", "{}")] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARGS]",
        "[TOOL_CALLS]now[ARGS]hello",
        "[TOOL_CALLS]now[ARG]{}",
        "[TOOL_CALLS]now[CALL_ID]{}",
        "[TOOL_CALLS]now[CALL_ID][ARGS]{}",
        "[TOOL_CALLS]now[CALL_ID]a[CALL_ID]b[ARGS]{}",
        "[TOOL_CALLS]now [ARGS]{}",
        "[TOOL_CALLS][5]",
        "[TOOL_CALLS]{}",
        "[TOOL_CALLS",
        "[[TOOL_CALL][TOOL]",
        "[a](b) [1, 2]",
        '[TOOL_CALLS][{"name": "now"',
    ],
)
def test_a_near_miss_is_content_whole(text: str) -> None:
    found = read_whole(MistralParser, text)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"[TOOL_CALLS][{NOW}, 5]", ", 5]", "{}"),
        (f"[TOOL_CALLS][{NOW} {NOW}]", f"{NOW}]", "{}"),
        ('[TOOL_CALLS]now[ARGS]{"a": x}', "x}", '{"a": '),
        ('[TOOL_CALLS][{"name": "now", "arguments": {"a": [1', "", '{"a": [1'),
    ],
)
def test_what_breaks_or_is_cut_off_after_a_call_was_told(text: str, content: str, arguments: str) -> None:
    found = read_whole(MistralParser, text)
    assert (found.content, found.calls) == (content, [("now", arguments)])
