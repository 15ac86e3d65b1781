"""What clients send because another server takes it, and means nothing here or something simple."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import ask
from test_completion_route import TEXT, complete, parrot, stream

from noria.text.chat import encode_chat
from noria.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(tokenizer: Tokenizer, **body: Any) -> Any:
    return ask(tokenizer, "POST", CHAT, json={"messages": HELLO, "max_tokens": 3, **body})


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "in_memory"},
        {"verbosity": "medium"},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "reasoning": "hm"}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
    ],
)
def test_a_chat_that_asks_for_nothing_special(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    response = chat(tokenizer, **body)
    assert response.status_code == 200, response.text
    assert "error" not in response.text


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "assistant", "tool_calls": None}])
def test_what_must_have_a_content(tokenizer: Tokenizer, message: dict[str, Any]) -> None:
    response = chat(tokenizer, messages=[message])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"


@pytest.mark.parametrize("name", ["self", "range", "not a name", "environment", "context", ""])
def test_variables_of_the_template_may_have_any_name(tokenizer: Tokenizer, name: str) -> None:
    response = chat(tokenizer, chat_template_kwargs={name: {"a": 1}})
    assert response.status_code == 200, response.text


def test_an_answer_may_be_gone_on_with(tokenizer: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "the mill "}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    for generation_prompt in (None, False):
        answer = chat(tokenizer, **body, add_generation_prompt=generation_prompt).json()
        ids = encode_chat(tokenizer, messages, continue_final_message=True)
        assert answer["choices"][0]["prompt_token_ids"] == ids
    told = ask(tokenizer, "POST", "/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert told["tokens"] == ids
    both = chat(tokenizer, **body, add_generation_prompt=True).json()["error"]
    assert "continue_final_message and add_generation_prompt do not work together" in both["message"]
    users = chat(tokenizer, continue_final_message=True).json()["error"]
    assert "needs a last message of the role assistant" in users["message"]


def test_completions_take_special_tokens_as_they_do_anyway(tokenizer: Tokenizer) -> None:
    assert complete(tokenizer, add_special_tokens=True)["choices"] == complete(tokenizer)["choices"]
    refused = ask(tokenizer, "POST", "/v1/completions", json={"prompt": TEXT, "add_special_tokens": False})
    assert refused.json()["error"]["message"] == "add_special_tokens is not supported; leave it out"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_without_an_answer_scores_the_prompt(tokenizer: Tokenizer, streamed: bool) -> None:
    body = {"prompt": [TEXT, "flour"], "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    if streamed:
        *chunks, last = stream(tokenizer, **body, stream_options={"include_usage": True})
        choices = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda each: each["index"])
        usage = last["usage"]
    else:
        answer = complete(tokenizer, **body)
        choices, usage = answer["choices"], answer["usage"]
    scored = complete(tokenizer, **{**body, "max_tokens": 1})["choices"]
    for choice, longer, prompt in zip(choices, scored, body["prompt"], strict=True):
        num_tokens = len(tokenizer.encode(prompt))
        assert choice["text"] == prompt
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([], "length", None)
        assert choice["logprobs"] == {name: values[:num_tokens] for name, values in longer["logprobs"].items()}
    assert usage["completion_tokens"] == 0


def test_no_tokens_without_echo_are_refused(tokenizer: Tokenizer) -> None:
    for echo in (None, False):
        response = ask(tokenizer, "POST", "/v1/completions", json={"prompt": TEXT, "max_tokens": 0, "echo": echo})
        assert response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_usage_in_every_chunk(tokenizer: Tokenizer, path: str) -> None:
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = ask(tokenizer, "POST", path, json={**prompt, "max_tokens": 7, "stream": True, "stream_options": options})
    chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 7
    assert chunks[-1]["choices"] == []


def test_usage_in_every_chunk_needs_usage(tokenizer: Tokenizer) -> None:
    chunks = stream(tokenizer, max_tokens=2, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == parrot(tokenizer, TEXT, 2)
