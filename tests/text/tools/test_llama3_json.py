from __future__ import annotations

import pytest
from tool_texts import read_whole

from noria.text.tools.llama3_json import Llama3JsonParser

NOW = '{"name": "now", "parameters": {}}'
WEATHER = '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "n": [{}]}}'


@pytest.mark.parametrize("before", ["", "\n ", "<|python_tag|>", "\n<|python_tag|> "])
def test_one_call(before: str) -> None:
    found = read_whole(Llama3JsonParser, before + WEATHER + "\n")
    assert (found.content, found.calls) == ("", [("get_weather", '{"city": "Paris", "n": [{}]}')])


@pytest.mark.parametrize("between", [";", "; ", ", ", "\n", "", " ;\n", "\n<|python_tag|>"])
def test_parallel_calls(between: str) -> None:
    found = read_whole(Llama3JsonParser, NOW + between + WEATHER + between + NOW)
    assert found.content == ""
    assert [name for name, _ in found.calls] == ["now", "get_weather", "now"]


def test_without_arguments() -> None:
    for text in ('{"name": "now"}', NOW, '{"name": "now", "arguments": null}'):
        assert read_whole(Llama3JsonParser, text).calls == [("now", "{}")]


def test_text_before_and_after() -> None:
    found = read_whole(Llama3JsonParser, f"Let me see.\n\n{NOW}\nThat was {NOW}")
    assert found.calls == [("now", "{}")]
    assert found.content == f"Let me see.That was {NOW}"
    found = read_whole(Llama3JsonParser, f"Let me see: <|python_tag|>{NOW}; and then")
    assert (found.content, found.calls) == ("Let me see:; and then", [("now", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "parameters": {}}',
        '{"name": "now", "age": 5}',
        '{"city": "Paris", "x": {"name": "now", "parameters": {}}}',
        f"  [{NOW}]",
        f'{{"x": [\n {NOW}]}}',
        f"so {NOW}",
        f"a\n  {NOW}",
        "{\n  margin: 0;\n}\n",
        "{",
        "{{{",
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>",
        "<|python",
        '{"type": "function"}',
    ],
)
def test_a_near_miss_is_content_whole(text: str) -> None:
    found = read_whole(Llama3JsonParser, text)
    assert (found.content, found.calls) == (text, [])


def test_a_near_miss_after_a_call() -> None:
    found = read_whole(Llama3JsonParser, f'{NOW}; {{"name": "x"}} ;')
    assert (found.content, found.calls) == ('; {"name": "x"} ;', [("now", "{}")])
