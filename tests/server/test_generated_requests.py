"""Requests made up from the OpenAPI document, right and wrong: none may be answered with 500, nor disturb others."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from typing import Any

import pytest
import schemathesis
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, Service, ask, service
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from noria.text.tokenizer import Tokenizer

NUM_EXAMPLES = 30
NUM_PLAIN = 3
BODIES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
PLAIN = ["/health", "/ready", "/metrics", "/version", "/v1/models"]  # nothing can be wrong with a request to these
TOKEN_IDS = {"items": {"type": "integer", "minimum": 0, "maximum": VOCAB_SIZE - 1}, "maxItems": MAX_MODEL_LEN - 1}
# So many at least are answered in the mode POSITIVE, and refused in NEGATIVE, or the test shows nothing. Right bodies
# break rules between fields, and wrong ones may be wrong in what was narrowed only.
LEAST = 5


# What is hardly ever right when it is made up: names that must be found elsewhere, and languages of their own.
UNLIKELY = (
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    *(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")),
    "text",
    "include",
    "previous_response_id",
    *("tool_calls", "tool_call_id", "reasoning", "reasoning_content"),  # for messages of one role
)


@functools.cache
def schema(tokenizer: Tokenizer, mode: GenerationMode = GenerationMode.NEGATIVE) -> Any:
    """The document, with what it cannot know: the size of this model, and that no model of another name is here."""
    document = ask(tokenizer, "GET", "/openapi.json").json()

    def narrow(node: Any) -> None:
        if isinstance(node, list):
            for each in node:
                narrow(each)
        elif isinstance(node, dict):
            if node.get("type") == "array" and node.get("items") == {"type": "integer"}:
                node.update(TOKEN_IDS)
            if mode is GenerationMode.POSITIVE and "tool" in node.get("enum", ()):
                node["enum"].remove("tool")
            properties = node.get("properties", {})
            for name in ("model", *(UNLIKELY if mode is GenerationMode.POSITIVE else ())):
                if isinstance(properties.get(name), dict) and (name != "text" or "anyOf" in properties[name]):
                    del properties[name]
            properties.get("n", {}).update(maximum=3)
            for value in node.values():
                narrow(value)

    narrow(document)
    return schemathesis.openapi.from_dict(document)


def whole(value: Any) -> Any:
    """To JSON Schema 3.0 is an integer; it is none here."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check(response: Any, seen: Counter[int]) -> None:
    seen[response.status_code] += 1
    assert response.status_code < 500, response.text
    if response.headers["content-type"].startswith("application/json"):
        content = json.loads(response.text, parse_constant=pytest.fail)
        if response.status_code >= 400:
            assert set(content) == {"error"}
            assert set(content["error"]) == {"message", "type", "param", "code"}
            assert content["error"]["message"]
    elif response.status_code == 200 and response.text.startswith("data: "):
        assert "[DONE]" in response.text
        assert '"internal_error"' not in response.text


def ask_generated(
    tokenizer: Tokenizer, operation: Any, mode: GenerationMode, count: int = NUM_EXAMPLES
) -> Counter[int]:
    """How often which status came."""
    seen: Counter[int] = Counter()
    options = settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    with asyncio.Runner() as runner:
        manager = service(tokenizer, max_queued_requests=16)
        running: Service = runner.run(manager.__aenter__())

        @options
        @given(operation.as_strategy(generation_mode=mode))
        def each(case: Case) -> None:
            found = case.as_transport_kwargs(base_url="http://noria")
            request = {name: found[name] for name in ("method", "url", "headers", "params", "json") if name in found}
            if mode is GenerationMode.POSITIVE and "json" in request:
                request["json"] = whole(request["json"])
            if "data" in found:
                request["content"] = found["data"]
            check(runner.run(asyncio.wait_for(running.http.request(**request), 20)), seen)

        each()
        runner.run(asyncio.wait_for(running.until_idle(), 5))
        runner.run(manager.__aexit__(None, None, None))
    return seen


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", BODIES)
def test_no_body_makes_the_server_fail(tokenizer: Tokenizer, path: str, mode: GenerationMode) -> None:
    # Of bodies with a prompt or messages and not both, and parts that are whole, few are made up.
    count = NUM_EXAMPLES * (4 if path == "/tokenize" else 1)
    seen = ask_generated(tokenizer, schema(tokenizer, mode)[path]["POST"], mode, count)
    assert set(seen) <= {200, 400, *([404] if path == "/v1/responses" else [])}  # for the one before
    assert seen[200 if mode is GenerationMode.POSITIVE else 400] >= LEAST


def test_every_route_is_asked(tokenizer: Tokenizer) -> None:
    stored = [f"/v1/responses/{{response_id}}{end}" for end in ("", "/input_items", "/cancel")]
    asked = {*BODIES, *stored, "/v1/models/{name}", *PLAIN}
    assert {found.ok().path for found in schema(tokenizer).get_all_operations()} == asked
    for path in PLAIN:
        seen = ask_generated(tokenizer, schema(tokenizer)[path]["GET"], GenerationMode.POSITIVE, NUM_PLAIN)
        assert seen.keys() == {200}
    for path, method in ((stored[0], "GET"), (stored[0], "DELETE"), (stored[1], "GET"), (stored[2], "POST")):
        kinds = ask_generated(tokenizer, schema(tokenizer)[path][method], GenerationMode.POSITIVE)
        assert kinds.keys() <= {400, 404}
    named = ask_generated(tokenizer, schema(tokenizer)["/v1/models/{name}"]["GET"], GenerationMode.POSITIVE)
    assert named.keys() <= {200, 400, 404}
