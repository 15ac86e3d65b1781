from __future__ import annotations

import json

import pytest
from tool_texts import TOOLS, read, read_whole

from noria.text.deltas import CallDelta
from noria.text.tools.hermes import HermesParser

WEATHER = '{"city": "Paris", "days": [1, -2.5e3, {"x": {}}], "note": "a \\"}\\" \\u00e9 水", "ok": true, "no": null}'


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_one_call() -> None:
    found = read_whole(HermesParser, call("get_weather", WEATHER))
    assert (found.content, found.calls) == ("", [("get_weather", WEATHER)])
    assert json.loads(found.calls[0][1])["note"] == 'a "}" é 水'


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser(TOOLS)
    assert parser.push('<tool_call>{"name": "now"') == []
    first, *none = parser.push(', "arguments": {"a"')
    assert not none
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "now", '{"a"')
    assert parser.push(": 1") == [CallDelta(0, ": 1")]
    assert parser.push("2}}") == [CallDelta(0, "2}")]
    assert parser.push("</tool_call>") == parser.finish() == []


@pytest.mark.parametrize("text", ["Let me look.\n\n", "  Hm <tool", "a\n b"])
def test_text_before(text: str) -> None:
    found = read_whole(HermesParser, text + "\n" + call("now"))
    assert (found.content, found.calls) == (text.rstrip(), [("now", "{}")])


def test_text_after_and_between() -> None:
    found = read_whole(HermesParser, f"one {call('now')} two\n{call('now')}\nthree\n")
    assert (found.content, found.calls) == ("onetwothree\n", [("now", "{}")] * 2)


def test_parallel_calls() -> None:
    text = "\n".join([call("now"), call("get_weather", '{"city":"Rome"}'), call("now", '{"zone": "UTC"}')])
    assert read_whole(HermesParser, text).calls == [
        ("now", "{}"),
        ("get_weather", '{"city":"Rome"}'),
        ("now", '{"zone": "UTC"}'),
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": {}}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "arguments": ""}', "{}"),
        ('{"arguments": null, "name": "now"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
        ('{"name":"now","parameters":{"a":1}}', '{"a":1}'),
        ('{ "id" : 7 , "name" : "now" , "x": [{"name": "y"}], "arguments" : { } , "z": 1 }', "{ }"),
        ('{"id": 7.5e1, "name": "now", "last": 3}', "{}"),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"\\u006eame": "n\\u006fw", "arguments": {"a": "\\ud83d\\ude00"}}', '{"a": "\\ud83d\\ude00"}'),
        ('{"name": "now", "arguments": {"a": "x\ny\t"}}', '{"a": "x\\ny\\t"}'),
    ],
)
def test_ways_to_write_a_call(text: str, arguments: str) -> None:
    for whole in (f"<tool_call>{text}</tool_call>", f"\n<tool_call>\n{text}\n</tool_call>\n", f"<tool_call>{text}"):
        found = read_whole(HermesParser, whole)
        assert (found.content, found.calls) == ("", [("now", arguments)])
        json.loads(found.calls[0][1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain text\n",
        "a < b, <tool> and <tool_calls>",
        "<tool_call",
        "<tool_call>",
        "<tool_call>\n",
        "<<tool_cal<tool_cal>",
        "x \n <tool_call>now</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "now"',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "now", "name": "now"}',
        '<tool_call>{"name": "now", "arguments": 5}',
        '<tool_call>{"name": "now", "arguments": [1]}',
        '<tool_call>{"name": "now", "arguments": "x"}',
        '<tool_call>{"name": "now", "arguments": "{} {}"}',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": "}',
        '<tool_call>{"name": "now", "arguments": tru}',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 01}, "name": "now"}</tool_call>',
        '<tool_call>{"name": "now" "arguments": {}}',
        "<tool_call>{'name': 'now'}",
        "<tool_call>{name: 1}",
        '<tool_call>{"name": "now",}',
        '<tool_call>{"x": NaN, "name": "now"}',
        '<tool_call>{"x": 1.}',
        '<tool_call>{"x": -}',
        '<tool_call>{"x": 1e}',
        '<tool_call>{"x": "\\q"}',
        '<tool_call>{"x": "\\u00zz"}',
        '<tool_call>{"x": [1 2]}',
        '<tool_call>{"x": [1,]}',
        "<tool_call>" + '{"x":' * 40,
        "</tool_call>",
    ],
)
def test_a_near_miss_is_content_whole(text: str) -> None:
    found = read_whole(HermesParser, text)
    assert (found.content, found.calls) == (text, [])


def test_a_near_miss_before_a_call() -> None:
    found = read_whole(HermesParser, f"<tool_call>oops <tool_call>{call('now')}")
    assert (found.content, found.calls) == ("<tool_call>oops <tool_call>", [("now", "{}")])


def test_a_call_that_breaks_after_it_was_told() -> None:
    found = read_whole(HermesParser, '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>')
    assert found.calls == [("now", '{"a": ')]
    assert found.content == "oops}}</tool_call>"


def test_a_call_that_is_cut_off_is_not_completed() -> None:
    found = read_whole(HermesParser, '<tool_call>{"name": "now", "arguments": {"a": "x')
    assert (found.content, found.calls) == ("", [("now", '{"a": "x')])


def test_what_stands_in_the_place_of_the_end_is_content() -> None:
    found = read_whole(HermesParser, '<tool_call>{"name": "now"} </tool done')
    assert (found.content, found.calls) == ("</tool done", [("now", "{}")])


def test_ids_differ() -> None:
    parser = HermesParser(TOOLS)
    ids = [delta.id for delta in parser.push(call("now") * 3) if isinstance(delta, CallDelta) and delta.id]
    assert len(set(ids)) == 3
    assert all(each.startswith("call_") for each in ids)


def test_deep_nesting_is_no_trouble() -> None:
    arguments = '{"a":' * 20_000 + "1" + "}" * 20_000
    assert read(HermesParser(TOOLS), [call("now", arguments)]).calls == [("now", arguments)]
