"""Structured output through a real server and the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess

MESSAGES: Any = [{"role": "user", "content": "which stone grinds"}]
SCHEMA = {
    "type": "object",
    "properties": {"stone": {"enum": ["upper", "lower"]}, "turns": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["stone", "turns"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "stone", "strict": True, "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<s1>", "schema": {"enum": [1]}, "end": "</s1>"}], "triggers": ["<s1>"]}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def check_stone(text: str | None) -> None:
    assert text is not None
    value = json.loads(text)
    assert list(value) == ["stone", "turns"]
    assert value["stone"] in ("upper", "lower")
    assert 0 <= value["turns"] <= 99


def test_a_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "seed": 4}
    arguments |= {"extra_body": {"structured_outputs": None}}
    whole = client.chat.completions.create(**arguments).choices[0]
    text, reasons = "", []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    if whole.finish_reason == "stop":  # the model may fill the rest with white space
        check_stone(whole.message.content)
    assert (text, reasons[-1]) == (whole.message.content, whole.finish_reason)


def test_every_way_to_ask(client: openai.OpenAI) -> None:
    ways: dict[str, Any] = {
        "json": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "regex": {"guided_regex": "[a-d]{4}"},
        "choice": {"structured_outputs": {"choice": ["upper", "lower"]}},
        "older choice": {"guided_choice": ["upper", "lower"]},
        "grammar": {"guided_grammar": 'root ::= "<" [a-c] ">"'},
        "tag": {"structured_outputs": {"structural_tag": TAG}},
    }
    found = {
        name: client.completions.create(model="tiny", prompt="the mill", max_tokens=60, seed=3, extra_body=body)
        for name, body in ways.items()
    }
    texts = {name: answer.choices[0].text for name, answer in found.items()}
    check_stone(texts["json"])
    assert len(texts["regex"]) == 4
    assert set(texts["regex"]) <= set("abcd")
    assert texts["choice"] in ("upper", "lower")
    assert texts["older choice"] in ("upper", "lower")
    assert texts["grammar"] in ("<a>", "<b>", "<c>")
    assert all(found[name].choices[0].finish_reason == "stop" for name in ("json", "regex", "choice", "grammar"))


def test_plain_and_structured_side_by_side(server: ServerProcess, client: openai.OpenAI) -> None:
    """Alone and in a crowd the answers are the same."""
    structured = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    bodies = [{"seed": seed, "extra_body": structured if seed % 2 else {}} for seed in range(10)]
    asked: list[Any] = [{"model": "tiny", "prompt": f"turn {i}", "max_tokens": 40, **b} for i, b in enumerate(bodies)]
    alone = [client.completions.create(**each).choices[0].text for each in asked]

    async def work() -> list[str]:
        async with server.async_client() as many:
            answers = await asyncio.gather(*(many.completions.create(**each) for each in asked))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(work()) == alone
    for text in alone[1::2]:
        check_stone(text)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_leaves_no_token_is_the_senders_mistake(server: ServerProcess, streamed: bool) -> None:
    body = {"model": "tiny", "prompt": "a", "guided_choice": ["upper"], "allowed_token_ids": [9], "stream": streamed}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == (200 if streamed else 400)
    assert '"type":"invalid_request_error"' in response.text
    assert "exclude all of them together" in response.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_regex": "("}, "regex cannot be used"),
        ({"structured_outputs": {"choice": []}}, "choice must hold at least one text"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        ({"guided_json": {"$ref": "#"}}, "no text can match it"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "at most 262144 are possible"),
        ({"guided_grammar": 'start: a\na: "x"\na: "y"'}, "duplicate rule"),
    ],
)
def test_a_bad_grammar_disturbs_nobody(
    server: ServerProcess, client: openai.OpenAI, body: dict[str, Any], message: str
) -> None:
    arguments: Any = {"model": "tiny", "prompt": "the mill", "max_tokens": 40, "temperature": 0}
    arguments["extra_body"] = {"ignore_eos": True}
    expected = client.completions.create(**arguments).choices[0].text
    stream = client.completions.create(**arguments, stream=True)
    pieces = [next(stream).choices[0].text]
    response = server.post("/v1/completions", json={"model": "tiny", "prompt": "a", **body})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == expected
