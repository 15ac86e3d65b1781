"""/v1/responses of a real server on a tiny model, driven by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from responses_client import check_order, sent_events, strict
from server_process import ServerProcess, wait_for

QUESTION: Any = {"model": "tiny", "input": "why does the river run", "max_output_tokens": 24, "temperature": 0}
EXACT: Any = {**QUESTION, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_a_response_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = strict(client.responses.create(**EXACT))
    assert len(whole.output_text) > 5
    assert whole.status == "incomplete"
    events = list(client.responses.create(**EXACT, stream=True))
    check_order([event.to_dict() for event in events])
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]
    with client.responses.stream(**EXACT) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": EXACT["input"]}],
        max_completion_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert chat.choices[0].message.content == whole.output_text


def test_a_conversation_by_id_finds_its_beginning_in_the_cache(client: openai.OpenAI) -> None:
    first = client.responses.create(**EXACT)
    second = client.responses.create(**{**EXACT, "input": "and the wheel"}, previous_response_id=first.id)
    items: Any = [
        {"role": "user", "content": EXACT["input"]},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "and the wheel"},
    ]
    spelled = client.responses.create(**{**EXACT, "input": items})
    assert spelled.output_text == second.output_text
    assert spelled.usage is not None
    assert second.usage is not None
    assert spelled.usage.input_tokens == second.usage.input_tokens
    assert spelled.usage.input_tokens_details.cached_tokens >= 16


def test_the_background_of_a_real_server(client: openai.OpenAI, server: ServerProcess) -> None:
    body = {**QUESTION, "max_output_tokens": 200, "ignore_eos": True}
    begun = client.responses.create(**{**EXACT, "max_output_tokens": 200}, background=True)
    assert begun.status == "in_progress"
    whole = server.post("/v1/responses", json=body).json()
    done = wait_for(lambda: (now := client.responses.retrieve(begun.id)).status != "in_progress" and now, 30)
    assert done.output_text == whole["output"][0]["content"][0]["text"]
    cancelled = client.responses.create(**{**EXACT, "max_output_tokens": 200}, background=True)
    assert client.responses.cancel(cancelled.id).status == "cancelled"
    server.wait_idle()


def test_a_stream_that_is_left(client: openai.OpenAI, server: ServerProcess) -> None:
    with client.responses.stream(**{**EXACT, "max_output_tokens": 200}) as stream:
        name = next(iter(stream)).response.id  # type: ignore[union-attr]
        for _, _ in zip(range(5), stream):
            pass
    server.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_what_goes_over_the_wire(server: ServerProcess) -> None:
    answer = server.post("/v1/responses", json={**QUESTION, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    check_order(sent_events(answer.content))
