"""Whatever a model writes and however it is cut: no parser fails, loses text, or says another thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_texts import TOOLS, Read, read

from noria.text.tools.base import ToolParser
from noria.text.tools.forced import ForcedParser
from noria.text.tools.formats import TOOL_PARSERS, recognize

PARSERS: dict[str, type[ToolParser]] = {**TOOL_PARSERS, "forced": ForcedParser}
PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>",
        "<|python_end|>", '{"name": "now"', '"name":', '"arguments": {', '"parameters": {"a": 1', "now", "get_weather",
        "[now(", "a=", "'x'", '"y"', "{}", "[]", "{", "}", "[", "]", "(", ")", ",", ":", '"', "'", "\\",
        "\\u00e9", "-", "1.5e3", "0", "tru", "true", "None", " ", "\n", ";", "<", "<tool", "é", "水", "😀",
    ]
)  # fmt: skip
CALLS = st.sampled_from(
    [
        '<tool_call>\n{"name": "now", "arguments": {"a": [1, "}"]}}\n</tool_call>',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "geo.find", "arguments": {"a": 1}}]',
        '[TOOL_CALLS]now[ARGS]{"a": 1}',
        '{"name": "now", "parameters": {"a": 1}}',
        "[now(a=1, b='x'), get_weather()]",
        "\n",
        "some words ",
    ]
)
TEXTS = st.lists(PIECES | CALLS | st.text(max_size=3), max_size=12).map("".join)


def parser_of(name: str) -> ToolParser:
    return PARSERS[name](TOOLS)


@pytest.mark.parametrize("name", PARSERS)
@given(text=TEXTS, data=st.data())
def test_a_text_says_the_same_however_it_is_cut(name: str, text: str, data: st.DataObject) -> None:
    whole = read(parser_of(name), [text])
    assert read(parser_of(name), text) == whole
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert read(parser_of(name), [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]) == whole


@pytest.mark.parametrize("name", PARSERS)
@given(text=TEXTS)
def test_nothing_is_lost_or_made_up(name: str, text: str) -> None:
    found = read(parser_of(name), [text])
    if not found.calls:
        assert found.content == text
    assert is_within(found.content, text)
    if name != "pythonic":
        for _, arguments in found.calls:
            assert arguments == "{}" or is_within("".join(arguments.split()), json_spellings(text))


def is_within(part: str, text: str) -> bool:
    """Whether `part` is left when characters are taken out of `text`."""
    rest = iter(text)
    return all(char in rest for char in part)


def json_spellings(text: str) -> str:
    """Control characters as they are escaped in strings; what is quoted twice can be unquoted."""
    return "".join(json.dumps(char)[1:-1] if char < " " else char for char in text)


@pytest.mark.parametrize("name", PARSERS)
@given(
    st.dictionaries(
        st.text(), st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.lists(st.text())
    )
)
def test_arguments_arrive_as_they_were_meant(name: str, arguments: dict) -> None:
    meant = json.dumps(arguments)
    text = {
        "hermes": f'<tool_call>\n{{"name": "now", "arguments": {meant}}}\n</tool_call>',
        "llama3_json": f'{{"name": "now", "parameters": {meant}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "now", "arguments": {meant}}}]',
        "forced": f'[{{"name": "now", "parameters": {meant}}}]',
        "pythonic": f"[now(a={arguments!r})]",
    }[name]
    found = read(parser_of(name), text)
    assert found.content == ""
    [(_, got)] = found.calls
    assert json.loads(got) == ({"a": arguments} if name == "pythonic" else arguments)


@pytest.mark.parametrize("text", ["plain words, and more", "a <b> [c] {d}", "x\ny"])
@pytest.mark.parametrize("name", PARSERS)
def test_plain_text_is_not_held_back(name: str, text: str) -> None:
    parser = parser_of(name)
    found = Read()
    for char in "so " + text:
        for delta in parser.push(char):
            found.content += getattr(delta, "text", "")
    assert found.content == "so " + text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function=example>", None),
        ("<tool_call>{function-name}\n<arg_key>", None),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|start_header_id|>{{ role }}", None),
        ("You MUST put it in the format of [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("{{ '<|python_start|>' }}", "pythonic"),
        ("<|im_start|>", None),
        ("", None),
    ],
)
def test_a_format_is_recognized_by_the_template(template: str, name: str | None) -> None:
    assert recognize(template) == name


def test_every_format_has_its_tests() -> None:
    here = Path(__file__).parent
    assert all((here / f"test_{name}.py").exists() for name in TOOL_PARSERS)
