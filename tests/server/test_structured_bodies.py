"""Structured output over HTTP: what is asked for reaches the engine, and what cannot be is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import ask, run, service
from test_completion_route import events, parrot
from test_refusals import CHAT, COMPLETIONS, GOOD, HELLO, error_of

from noria.config import StructuredOutputsParams
from noria.server.schema.chat import ChatBody
from noria.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
        ({"structured_outputs": {"json": None, "regex": None}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "description": None, "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            {"structural_tag": {"type": "structural_tag", **TAG}},
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "array"}'}, {"json": '{"type": "array"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'start: "a"', "response_format": {"type": "text"}}, {"grammar": 'start: "a"'}),
    ],
)
def test_what_a_body_asks_for(body: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    params = ChatBody.model_validate({"messages": HELLO, **body}).params
    assert params.structured_outputs == (None if wanted is None else StructuredOutputsParams(**wanted))


REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": {"type": "xml"}}, "response_format: type must be one of text, json_object", "response_format"),
    ({"response_format": {}}, "response_format: type must be one of", "response_format"),
    ({"response_format": "json"}, "response_format: ", "response_format"),
    ({"response_format": {"type": "json_object", "a": 1}}, "of type json_object has no a", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema must have a schema", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "json_schema.strict must be true or false",
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "colour": 1}}},
        "json_schema has no colour",
        "response_format",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex does not work together with guided_json", "guided_regex"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of", "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "unknown option jsn; did you mean json?", "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "exactly one of", "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "choice must hold at least one text", "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "choice must be a list", "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "regex must be", "structured_outputs"),
    ({"guided_choice": []}, "guided_choice: choice must hold at least one text", "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice", "guided_choice[0]"),
    # What only the compiler finds.
    ({"guided_regex": "("}, "regex cannot be used: ", None),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]', None),
    ({"guided_json": {"$ref": "#"}}, "no text can match it", None),
    ({"guided_json": "[1]"}, "json must be a JSON schema", None),
    ({"guided_json": {"enum": ["x" * 300_000]}}, "at most 262144", None),
    ({"guided_grammar": 'start: a\na: "x"\na: "y"'}, 'duplicate rule: "a"', None),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "a format must have a type", None),
]


@pytest.mark.parametrize(("body", "message", "param"), REFUSALS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_refused(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    good = GOOD if path == COMPLETIONS else {"messages": HELLO}
    error = error_of(ask(tokenizer, "POST", path, json={**good, **body}))
    assert message in error["message"]
    assert error["param"] == param


def test_refusals_disturb_nobody(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            good = {**GOOD, "max_tokens": 100, "stream": True}
            stream = asyncio.ensure_future(running.http.post(COMPLETIONS, json=good))
            await running.steps(5)
            for bad, message, _ in REFUSALS[-7:]:
                assert message in error_of(await running.http.post(COMPLETIONS, json={**GOOD, **bad}))["message"]
            texts = [chunk["choices"][0]["text"] for chunk in events(await stream)]
            assert "".join(texts) == parrot(tokenizer, "flour", 100)

    run(work())
