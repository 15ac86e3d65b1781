"""The official client of OpenAI's API on a real model: every call returns what the client's types promise."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from server_process import ServerProcess

MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"model": MODEL, "temperature": 0}
CHAT: Any = {**GREEDY, "messages": QUESTION}
LONG = "The mill by the river has a wheel with twelve buckets. " * 12
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, max_completion_tokens=24)
    choice = whole.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    stream = client.chat.completions.create(
        **CHAT, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (whole.usage, chunks[-1].usage)]
    assert counts[0] == counts[1]
    assert sum(counts[0][:2]) == counts[0][2]


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, max_completion_tokens=24)
    with client.chat.completions.stream(**CHAT, max_completion_tokens=24) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_a_conversation_of_several_turns(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**CHAT, max_completion_tokens=24).choices[0].message
    more: Any = [*QUESTION, first.to_dict(), {"role": "user", "content": [{"type": "text", "text": "Thank you!"}]}]
    answer = client.chat.completions.create(**GREEDY, messages=more, max_completion_tokens=16)
    assert answer.choices[0].message.content


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**CHAT, max_completion_tokens=8, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens).startswith(choice.message.content or "?")
    for token in tokens:
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy
        assert len(token.top_logprobs) == 3
        assert -math.inf < token.logprob <= 0
        assert bytes(token.bytes or []).decode("utf-8", "replace") == token.token


def test_a_completion_with_echo_and_log_probabilities(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    choice = client.completions.create(**GREEDY, prompt=prompt, max_tokens=4, echo=True, logprobs=2).choices[0]
    assert choice.text.startswith(prompt + " Paris")
    found = choice.logprobs
    assert found is not None
    assert "".join(found.tokens or []) == choice.text
    assert len(found.tokens or []) == len(found.token_logprobs or []) == len(found.text_offset or [])
    assert (found.token_logprobs or [0.0])[0] is None


def test_lists_of_prompts_and_several_answers(client: openai.OpenAI) -> None:
    prompts = ["One two three", "Monday Tuesday"]
    both = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8)
    alone = [client.completions.create(**GREEDY, prompt=prompt, max_tokens=8).choices[0].text for prompt in prompts]
    assert [choice.text for choice in sorted(both.choices, key=lambda choice: choice.index)] == alone
    sampled: Any = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 7, "temperature": 1.2, "max_tokens": 16}
    texts = [[choice.message.content for choice in client.chat.completions.create(**sampled).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_stop_bias_and_penalties(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(**CHAT, max_completion_tokens=24, stop=["Paris"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert "Paris" not in (stopped.message.content or "")
    counted: Any = {**GREEDY, "prompt": "la la la la la", "max_tokens": 24}
    plain = client.completions.create(**counted).choices[0].text
    penalized = client.completions.create(**counted, frequency_penalty=2, presence_penalty=1).choices[0].text
    assert penalized != plain
    forced = client.completions.create(**counted, logit_bias={"3123": 100}, logprobs=0).choices[0].logprobs
    assert forced is not None
    assert len(forced.tokens or []) == 24
    assert len(set(forced.tokens or [])) == 1


def test_the_prefix_cache_shows(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        usage = client.completions.create(**GREEDY, prompt=LONG, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < cached[1] < usage.prompt_tokens


class Capital(pydantic.BaseModel):
    city: Literal["Paris", "Lyon"]
    population_in_millions: int


def test_structured_answers(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        **CHAT, max_completion_tokens=64, response_format=Capital, extra_body={"seed": 1}
    )
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Capital)
    any_object = client.chat.completions.create(
        **CHAT,
        max_completion_tokens=96,
        extra_body={"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    ).choices[0]
    assert (any_object.message.content or "").startswith("{")
    if any_object.finish_reason == "stop":
        assert isinstance(json.loads(any_object.message.content or ""), dict)
    chosen = client.chat.completions.create(**CHAT, extra_body={"structured_outputs": {"choice": ["Rome", "Paris"]}})
    assert chosen.choices[0].message.content == "Paris"


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="What is the capital of France?", max_output_tokens=24)
    assert "Paris" in first.output_text
    with client.responses.stream(**GREEDY, input="What is the capital of France?", max_output_tokens=24) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert final.output_text == first.output_text
    again = client.responses.create(**GREEDY, input="Are you sure?", previous_response_id=first.id, max_output_tokens=8)
    assert again.previous_response_id == first.id
    assert client.responses.retrieve(again.id).output_text == again.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_refusals(client: openai.OpenAI, server: ServerProcess) -> None:
    bad = openai.BadRequestError
    with pytest.raises(openai.NotFoundError, match="there is smollm2"):
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(bad, match="max_model_len"):
        client.completions.create(**GREEDY, prompt=LONG * 20)
    with pytest.raises(bad, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    with pytest.raises(bad, match="logit_bias"):
        client.completions.create(**GREEDY, prompt="a", logit_bias={"49152": 1})
    with pytest.raises(bad, match="best_of"):
        client.completions.create(**GREEDY, prompt="a", best_of=3)
    with pytest.raises(bad, match="tools: "):  # which this model's chat template does not know
        client.chat.completions.create(**CHAT, tools=[TOOL])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert client.chat.completions.create(**CHAT, max_completion_tokens=2).choices


def test_streams_side_by_side_are_those_alone(client: openai.OpenAI, server: ServerProcess) -> None:
    prompts = [f"{word} is a place where" for word in ("Paris", "The sea", "A school", "The moon", "A farm", "Home")]
    options: Any = {**GREEDY, "max_tokens": 24}
    alone = [client.completions.create(**options, prompt=prompt).choices[0].text for prompt in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(**options, prompt=prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with server.async_client() as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    assert asyncio.run(all_of_them()) == alone
