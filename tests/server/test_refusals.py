"""Bad input: the sender is told what is wrong, with the status that fits, and everybody else's answers go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import ask, run, service
from test_completion_route import events, parrot

from noria.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "parrot", "prompt": "flour", "max_tokens": 4}
HELLO = [{"role": "user", "content": "hello"}]


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"prompt": None}, "prompt must be a string", "prompt"),
        ({"prompt": 5}, "prompt must be a string", "prompt"),
        ({"prompt": []}, "prompt must be a string", "prompt"),
        ({"prompt": [1, "a"]}, "prompt must be a string", "prompt"),
        ({"prompt": [1.5]}, "prompt must be a string", "prompt"),
        ({"prompt": [True]}, "prompt must be a string", "prompt"),
        ({"prompt": [[1, None]]}, "prompt must be a string", "prompt"),
        ({"prompt": ""}, "the prompt is empty", None),
        ({"prompt": [[]]}, "the prompt is empty", None),
        # The model has 208 embeddings: these ids are in the padding of its vocabulary.
        ({"prompt": [192]}, "192, which is no token id", None),
        ({"prompt": [207]}, "207, which is no token id", None),
        ({"bad_token_ids": [200]}, "bad_token_ids: 200 is not a token id", None),
        ({"prompt": [-1]}, "-1, which is no token id", None),
        ({"prompt": [2**70]}, "no token id", None),
        ({"prompt": [5] * 128}, "the prompt has 128 tokens", None),
        ({"prompt": "\ud800"}, "", None),
        ({"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens: ", "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens: ", "max_tokens"),
        ({"max_tokens": True}, "max_tokens: ", "max_tokens"),
        ({"temperature": "hot"}, "temperature: ", "temperature"),
        ({"temperature": -1}, "temperature must be", "temperature"),
        ({"temperature": False}, "temperature: ", "temperature"),
        ({"top_p": 0}, "top_p must be in (0, 1]", "top_p"),
        ({"top_k": -2}, "top_k must be", "top_k"),
        ({"n": 0}, "n must be at least 1", "n"),
        ({"n": 10**9}, "a request for 1000000000 sequences", None),
        ({"seed": 2**64}, "seed must fit 64 bits", "seed"),
        ({"top_k": 10**25}, "top_k must fit 64 bits", "top_k"),
        ({"max_tokens": 1e300}, "max_tokens must fit 64 bits", "max_tokens"),
        ({"min_tokens": 2**63, "max_tokens": None}, "min_tokens must fit 64 bits", "min_tokens"),
        ({"priority": 10**25}, "priority must fit 64 bits", None),
        ({"logit_bias": {"9" * 5000: 1}}, "is not a token id", "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias: '٣' is not a token id", "logit_bias"),
        ({"": 1}, "a field without a name is not supported", None),
        ({"stop": [1]}, "stop must be a string or a list of strings", "stop"),
        ({"stop": ""}, "stop must not contain an empty string", "stop"),
        ({"stop_token_ids": [500]}, "stop_token_ids: 500 is not a token id", None),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids", "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias: 'a' is not a token id", "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "logit_bias[5]"),
        ({"logit_bias": [5]}, "logit_bias: ", "logit_bias"),
        ({"stream": "yes"}, "stream: ", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams", "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x is not supported", "stream_options.x"),
        ({"echo": 1}, "echo: ", "echo"),
        ({"min_tokens": 5}, "min_tokens (5) must not exceed max_tokens (4)", "min_tokens"),
        ({"priority": 3}, "priority needs a server", None),
        ({"cache_salt": ""}, "cache_salt must not be empty", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"logprobs": True}, "logprobs: ", "logprobs"),
        ({"logprobs": 1, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs must be equal", "prompt_logprobs"),
        ({"logit_bias": {"192": 1}}, "logit_bias: 192 is not a token id", None),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold", "allowed_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty must be in", "presence_penalty"),
        ({"best_of": 3}, "best_of is not supported", "best_of"),
        ({"suffix": "end"}, "suffix is not supported", "suffix"),
        ({"use_beam_search": True}, "use_beam_search is not supported", "use_beam_search"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not", "guided_whitespace_pattern"),
        ({"max_token": 5}, "max_token is not supported; did you mean max_tokens?", "max_token"),
        ({"zzz": 5}, "zzz is not supported", "zzz"),
    ],
)
def test_a_bad_completion(tokenizer: Tokenizer, body: dict[str, Any], message: str, param: str | None) -> None:
    content = json.dumps({**GOOD, **body}).encode()
    error = error_of(ask(tokenizer, "POST", COMPLETIONS, content=content))
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"messages": None}, "messages: ", "messages"),
        ({"messages": []}, "messages: ", "messages"),
        ({"messages": "hello"}, "messages: ", "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing", "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing", "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: ", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content of a message must be", "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "the content of a message must be", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "a content part must be of type text, not 'image_url'",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "must have a text that is a string",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]},
            "a content part of type text has no colour",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "colour": "red"}]},
            "messages[0].colour is not supported",
            "messages[0].colour",
        ),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs", "top_logprobs"),
        ({"logprobs": 3}, "logprobs: ", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", None),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs must be", "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs does not work with stream", "prompt_logprobs"),
        ({"store": 0}, "store is not supported", "store"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is the older name", "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not contain messages", None),
        ({"messages": [{"role": "user", "content": "long " * 400}]}, "max_model_len (128)", None),
    ],
)
def test_a_bad_chat(tokenizer: Tokenizer, body: dict[str, Any], message: str, param: str | None) -> None:
    error = error_of(ask(tokenizer, "POST", CHAT, json={"messages": HELLO, **body}))
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a",}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "user": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_what_is_no_json_object(tokenizer: Tokenizer, content: bytes) -> None:
    error = error_of(ask(tokenizer, "POST", COMPLETIONS, content=content))
    assert error["message"].startswith(("the body ", "prompt must", "temperature"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_model(tokenizer: Tokenizer, path: str) -> None:
    body = {COMPLETIONS: GOOD, CHAT: {"messages": HELLO}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
    error = error_of(ask(tokenizer, "POST", path, json={**body[path], "model": "gpt-9"}), 404)
    assert error["message"] == "the model 'gpt-9' does not exist here; there is parrot, polly"
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt or messages must be given"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt or messages must be given"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt is for messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens is for a prompt"),
        ("/detokenize", {"tokens": [500]}, "tokens: 500 is not a token id"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": "a"}, "tokens must be a list of token ids"),
    ],
)
def test_a_bad_tokenize(tokenizer: Tokenizer, path: str, body: dict[str, Any], message: str) -> None:
    assert message in error_of(ask(tokenizer, "POST", path, json=body))["message"]


def test_a_bad_request_disturbs_nobody(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with service(tokenizer, step_s=0.001) as running:
            good = {**GOOD, "max_tokens": 60, "stream": True}
            streams = [asyncio.ensure_future(running.http.post(COMPLETIONS, json=good)) for _ in range(3)]
            await running.steps(5)
            for bad in ({"prompt": [192]}, {"temperature": -1}, {"zzz": 1}, {"n": 10**6}, {"prompt": [5] * 500}):
                error_of(await running.http.post(COMPLETIONS, json={**GOOD, **bad}))
            for stream in streams:
                texts = [chunk["choices"][0]["text"] for chunk in events(await stream)]
                assert "".join(texts) == parrot(tokenizer, "flour", 60)

    run(work())
