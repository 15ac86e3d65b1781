from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_texts import read_whole

from noria.text.tools.python_scan import PythonScanner
from noria.text.tools.pythonic import PythonicParser


def test_calls() -> None:
    text = "[get_weather(city='Paris', days=3), now(), geo.find(at={'x': [1, (2, 3)], \"y\": None}, ok=True)]"
    for whole in (text, f"\n{text}\n", f"<|python_start|>{text}<|python_end|>", f"<|python_start|> {text}"):
        found = read_whole(PythonicParser, whole)
        assert (found.content, found.calls) == (
            "",
            [
                ("get_weather", '{"city": "Paris", "days": 3}'),
                ("now", "{}"),
                ("geo.find", '{"at": {"x": [1, [2, 3]], "y": null}, "ok": true}'),
            ],
        )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("now()", "{}"),
        ("now( )", "{}"),
        ("now(a=1,)", '{"a": 1}'),
        ("now( a = 1 , b=-2.5e3 ),", '{"a": 1, "b": -2.5e3}'),
        ("now(a=[], b={}, c=())", '{"a": [], "b": {}, "c": []}'),
        ("now(a=[1,], b={'x': 1,})", '{"a": [1], "b": {"x": 1}}'),
        (
            "now(a='it\\'s', b=\"a\\\\b\\n\\t\\x41\\u00e9\\U0001f600\\d\")",
            '{"a": "it\'s", "b": "a\\\\b\\n\\tAé😀\\\\d"}',
        ),
        ("now(a='\\ud83d\\ude00')", '{"a": "\\ud83d\\ude00"}'),
        ("now(a='\"', b='水)]', c=', ')", '{"a": "\\"", "b": "水)]", "c": ", "}'),
        ("now(a='x\\\ny\nz')", '{"a": "xy\\nz"}'),
        ("now(a=1_000, b=.5, c=0x10, d=+7, e=1., f=1e5)", '{"a": 1000, "b": 0.5, "c": 16, "d": 7, "e": 1.0, "f": 1e5}'),
        ("now(a=true, b=null, c=False)", '{"a": true, "b": null, "c": false}'),
    ],
)
def test_literals(text: str, arguments: str) -> None:
    found = read_whole(PythonicParser, f"[{text}]")
    assert (found.content, found.calls) == ("", [("now", arguments)])
    json.loads(arguments)


def test_text_before_and_after() -> None:
    found = read_whole(PythonicParser, "Sure:\n[now()]\nand [now()]")
    assert (found.content, found.calls) == ("Sure:and [now()]", [("now", "{}")])
    found = read_whole(PythonicParser, "Sure: <|python_start|>[now()]<|python_end|> done")
    assert (found.content, found.calls) == ("Sure:done", [("now", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "[a link](http://x)",
        "[1, 2, 3]",
        "[]",
        "[",
        "[now",
        "[now]",
        "[now(",
        "[now(a",
        "[now(5)]",
        "[now('x')]",
        "[now(a b=1)]",
        "[now(=1)]",
        "[unknown(a=1)]",
        "[ other() ]",
        "x [now()]",
        "now()",
        "<|python_start|>",
        "<|python_start|>now()",
        "<|python_start|>print(1)<|python_end|>",
        "<|python_",
    ],
)
def test_a_near_miss_is_content_whole(text: str) -> None:
    found = read_whole(PythonicParser, text)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("[now(a=foo)]", "foo)]", '{"a": '),
        ("[now(a=1, b)]", ", b)]", '{"a": 1'),
        ("[now(a=1, a=2)]", ", a=2)]", '{"a": 1'),
        ("[now(a='x' 'y')]", " 'y')]", '{"a": "x"'),
        ("[now(a='\\777')]", "\\777')]", '{"a": "'),
        ("[now(a='\\uzz')]", "\\uzz')]", '{"a": "'),
        ("[now(a={1: 2})]", "1: 2})]", '{"a": {'),
        ("[now(a={'x'})]", "})]", '{"a": {"x"'),
        ("[now(a=[1)]", "1)]", '{"a": ['),
        ("[now(a=inf)]", "inf)]", '{"a": '),
        ("[now(a=1e999999)]", "", None),
        ("[now(a=)]", ")]", '{"a": '),
        ("[now()", "", "{}"),
        ("[now() now()]", "now()]", "{}"),
        ("[now(), unknown()]", ", unknown()]", "{}"),
        ("[now(), ]", "", "{}"),
        ("[now(a='x", "", '{"a": "x'),
        ("<|python_start|>[now()]<|python_x", "<|python_x", "{}"),
    ],
)
def test_what_breaks_or_is_cut_off_after_a_call_was_told(text: str, content: str, arguments: str | None) -> None:
    found = read_whole(PythonicParser, text)
    expected = '{"a": 1e999999}' if arguments is None else arguments
    assert (found.content, found.calls) == (content, [("now", expected)])


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(literals)
def test_what_python_writes_is_read_as_python_reads_it(value: Any) -> None:
    scanner, text = PythonScanner(), repr(value)
    pieces = [scanner.feed(char) for char in text]
    assert None not in pieces
    assert scanner.may_end
    assert json.loads("".join(map(str, pieces)) + str(scanner.end())) == ast.literal_eval(text)
