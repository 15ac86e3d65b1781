"""The official client on a service in this process, and what its answers must look like."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import openai
from fake_engine import Service, run, service
from openai.types.responses import Response

from noria.text.tokenizer import Tokenizer

RESPONSES = "/v1/responses"
DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@contextlib.asynccontextmanager
async def talk(tokenizer: Tokenizer, **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Service]]:
    async with service(tokenizer, **options) as running:
        http: Any = running.http  # of a package that httpx has been split from
        client = openai.AsyncOpenAI(api_key="none", base_url="http://noria/v1", http_client=http, max_retries=0)
        yield client, running


def talking(tokenizer: Tokenizer, work: Callable[[openai.AsyncOpenAI, Service], Awaitable[Any]], **options: Any) -> Any:
    """What `work` returns for a service of its own."""

    async def begin() -> Any:
        async with talk(tokenizer, **options) as (client, running):
            return await work(client, running)

    return run(begin())


def ask(tokenizer: Tokenizer, **body: Any) -> Response:
    async def work(client: openai.AsyncOpenAI, _: Service) -> Response:
        return strict(await client.responses.create(**{"model": "parrot", "input": "why", **body}))

    return talking(tokenizer, work)


def strict(response: Response) -> Response:
    """The client takes anything; its types say what it should be."""
    return Response.model_validate_json(response.to_json(exclude_unset=False))


def sent_events(body: bytes) -> list[dict[str, Any]]:
    """Of a stream: each with its type told twice, numbered, and nothing after the last."""
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def check_order(events: Sequence[Any]) -> None:
    """Events as dictionaries: the exact grammar of a stream, and that its pieces make up what its ends say."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete", "response.failed")
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    output = events[-1]["response"]["output"]
    groups = itertools.groupby(events[2:-1], key=lambda event: event["output_index"])
    shown = [(index, list(group)) for index, group in groups]
    assert [index for index, _ in shown] == list(range(len(output)))
    for (_, group), item in zip(shown, output, strict=True):
        _check_item(group, item)


def _check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    name = DELTAS[item["type"]]
    added, *inner, done = events
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert added["item"]["status"] == "in_progress"
    assert (added["item"]["id"], done["item"]) == (item["id"], item)
    assert {event["item_id"] for event in inner} == {item["id"]}
    if item["type"] == "function_call":
        deltas, end, whole = inner[:-1], inner[-1], item["arguments"]
        assert end["arguments"] == whole
        assert added["item"]["arguments"] == ""
    else:
        first, *deltas, end, last = inner
        assert (first["type"], last["type"]) == ("response.content_part.added", "response.content_part.done")
        [part] = item["content"]
        assert (first["part"]["text"], last["part"], added["item"]["content"]) == ("", part, [])
        whole = part["text"]
        assert end["text"] == whole
        assert {event["content_index"] for event in inner} == {0}
    assert end["type"] == f"{name}.done"
    assert {event["type"] for event in deltas} <= {f"{name}.delta"}
    assert "".join(event["delta"] for event in deltas) == whole
    assert all(event["delta"] for event in deltas)
