"""What each kind of structured output allows, written character by character."""

from __future__ import annotations

from typing import Any

import pytest
from grammars import begin, write

from noria.config import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
OLDER = {
    "structures": [
        {"begin": "<fn=a>", "schema": PERSON, "end": "</fn>"},
        {"begin": "<fn=b>", "schema": {"type": "array"}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}
TOOL_TAG = {
    "type": "tag",
    "begin": "<tool>call ",
    "content": {"type": "json_schema", "json_schema": PERSON},
    "end": "</tool>",
}


def triggered(**options: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [TOOL_TAG], **options}}


THINKING = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<think>"},
            {"type": "any_text"},
            {"type": "const_string", "value": "</think>"},
            {"type": "json_schema", "json_schema": PERSON},
        ],
    },
}
LISTED = {
    "format": {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[a/]+"}, "end": "]"}],
        "separator": ", ",
        "at_least_one": True,
    }
}
EITHER = {
    "format": {
        "type": "or",
        "elements": [
            {"type": "const_string", "value": "no"},
            {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
        ],
    }
}


@pytest.mark.parametrize(
    ("params", "text", "outcome"),
    [
        ({"json": PERSON}, '{"name": "Bob"}', "must end"),
        ({"json": PERSON}, '{"name": "Bob", "age": 1', "more"),
        ({"json": PERSON}, '{"name": "Bobb', 'refused b'),
        ({"json": PERSON}, '{"age"', 'refused age"'),
        ({"json": PERSON}, '{"name": "é日a"}', "must end"),
        ({"json": PERSON}, '{"name": "a", "age": -', "refused -"),
        ({"json": PERSON}, '{ "name" :\n"a" }', "must end"),
        ({"json": PERSON, "disable_any_whitespace": True}, '{"name":"a","age":10}', "must end"),
        ({"json": PERSON, "disable_any_whitespace": True}, "{ ", "refused  "),
        ({"json": '{"enum": ["a", 1, null]}'}, "1", "must end"),
        ({"json": {"type": "object", "properties": {"next": {"$ref": "#"}}}}, '{"next": {"next": {}}}', "must end"),
        ({"json": {}}, "[1, {}]", "must end"),
        ({"json_object": True}, '{"a": [1, {"b": null}]}', "must end"),
        ({"json_object": True}, "[", "refused ["),
        ({"json_object": True, "disable_any_whitespace": True}, '{"a":[1', "more"),
        ({"regex": "(ab|ba){2}"}, "abba", "must end"),
        ({"regex": "(ab|ba){2}"}, "aa", "refused a"),
        ({"regex": "[0-9]+"}, "12", "may end"),
        ({"regex": "."}, "日", "must end"),
        ({"regex": "a/b"}, "a/b", "must end"),
        ({"choice": ["red", "redder", "blue"]}, "red", "may end"),
        ({"choice": ["red", "redder", "blue"]}, "redder", "must end"),
        ({"choice": ["red", "redder", "blue"]}, "re", "more"),
        ({"choice": ["red", "redder", "blue"]}, "green", "refused green"),
        ({"choice": ['a"\\n\n/*', "<x>"]}, 'a"\\n\n/*', "must end"),
        ({"choice": ["😀", "é"]}, "😀", "must end"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "aacbb", "must end"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "aacba", "refused a"),
        ({"grammar": 'root ::= "a" root "b" | [cd] # a comment'}, "aadbb", "must end"),
        ({"structural_tag": OLDER}, "well", "may end"),
        ({"structural_tag": OLDER}, 'so <fn=a>{"name": "x"}</fn> and <fn=b>[]</fn>.', "may end"),
        ({"structural_tag": OLDER}, 'so <fn=a>{"name": "x"}', "more"),
        ({"structural_tag": OLDER}, "so <fn=a>[", "refused ["),
        ({"structural_tag": OLDER}, "<fn=c", "refused c"),
        ({"structural_tag": OLDER}, "a < b, <fn", "may end"),
        ({"structural_tag": triggered()}, 'x<tool>call {"name": "x"}</tool>y<tool>call {', "more"),
        ({"structural_tag": triggered()}, "<tool>cald", "refused d"),
        ({"structural_tag": triggered(at_least_one=True)}, "x", "more"),
        ({"structural_tag": triggered(stop_after_first=True)}, '<tool>call {"name": "x"}</tool>', "must end"),
        ({"structural_tag": triggered(stop_after_first=True)}, "x", "may end"),
        (
            {"structural_tag": triggered(stop_after_first=True, at_least_one=True)},
            'well <tool>call {"name": "x"}</tool>',
            "must end",
        ),
        ({"structural_tag": triggered(stop_after_first=True, at_least_one=True)}, "x", "more"),
        ({"structural_tag": THINKING}, '<think>a < b\n</think>{"name": "x"}', "must end"),
        ({"structural_tag": THINKING}, "<think>a", "more"),
        ({"structural_tag": LISTED}, "[a/a], [a]", "may end"),
        ({"structural_tag": LISTED}, "[a/a][", "refused ["),
        ({"structural_tag": EITHER}, "no", "must end"),
        ({"structural_tag": EITHER}, "<a>x<b></a>", "must end"),
        ({"structural_tag": EITHER}, "yes", "refused yes"),
    ],
)  # fmt: skip
def test_what_may_be_written(params: dict[str, Any], text: str, outcome: str) -> None:
    assert write(begin(StructuredOutputsParams(**params)), text) == outcome
