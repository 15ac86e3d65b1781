"""Log-probabilities in the shapes of the API, whole and streamed, of answers and prompts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import ask
from test_completion_route import TEXT, events

from noria.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> Any:
    response = ask(tokenizer, "POST", path, json=body)
    assert response.status_code == 200, response.text
    return response


def test_a_completion(tokenizer: Tokenizer) -> None:
    """Prompt 11, 40: the likeliest are always 10 and 11."""
    body = {"prompt": [11, 40], "max_tokens": 2, "logprobs": 2}
    [choice] = post(tokenizer, COMPLETIONS, body).json()["choices"]
    texts = {i: tokenizer.token_bytes(i).decode() for i in (10, 11, 40)}
    assert choice["logprobs"] == {
        "text_offset": [0, len(texts[11])],
        "token_logprobs": [-2.0, -50.0],
        "tokens": [texts[11], texts[40]],
        "top_logprobs": [{texts[11]: -2.0, texts[10]: -1.0}, {texts[40]: -50.0, texts[10]: -1.0, texts[11]: -2.0}],
    }
    [none] = post(tokenizer, COMPLETIONS, {**body, "logprobs": 0}).json()["choices"]
    assert none["logprobs"]["top_logprobs"] == [{texts[11]: -50.0}, {texts[40]: -50.0}]
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_shows_those_of_the_prompt_too(tokenizer: Tokenizer, streamed: bool) -> None:
    body = {"prompt": ["flour", TEXT], "max_tokens": 5, "logprobs": 1, "echo": True, "n": 2, "stream": streamed}
    response = post(tokenizer, COMPLETIONS, body)
    found: list[dict[str, list[Any]]] = [{} for _ in range(4)]
    texts = [""] * 4
    for answer in events(response) if streamed else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
            for name, values in choice["logprobs"].items():
                found[choice["index"]].setdefault(name, []).extend(values)
    for index, logprobs in enumerate(found):
        prompt = tokenizer.encode(body["prompt"][index // 2])
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 5}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
        assert "".join(logprobs["tokens"]) == texts[index]
        lengths = list(map(len, logprobs["tokens"]))
        assert logprobs["text_offset"] == [sum(lengths[:place]) for place in range(len(lengths))]


@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_a_chat_whole_and_streamed(tokenizer: Tokenizer, num_top: int | None) -> None:
    body = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 9, "logprobs": True, "top_logprobs": num_top}
    [choice] = post(tokenizer, CHAT, {**body, "return_token_ids": True}).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [bytes(token["bytes"]) for token in content] == [tokenizer.token_bytes(i) for i in choice["token_ids"]]
    for token, token_id in zip(content, choice["token_ids"], strict=True):
        assert token["token"] == bytes(token["bytes"]).decode("utf-8", errors="replace")
        assert len(token["top_logprobs"]) == (num_top or 0)
        assert [top["logprob"] for top in token["top_logprobs"]] == [-1.0, -2.0][: num_top or 0]
        assert token["logprob"] == (9.0 - token_id if 10 <= token_id < 10 + (num_top or 0) else -50.0)
    streamed = events(post(tokenizer, CHAT, {**body, "stream": True}))
    pieces = [chunk["choices"][0]["logprobs"]["content"] for chunk in streamed]
    assert [token for piece in pieces for token in piece] == content


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_those_of_a_prompt(tokenizer: Tokenizer, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    body |= {"prompt": "flour"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "flour"}]}
    answer = post(tokenizer, path, body).json()
    found = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    prompt = answer["choices"][0]["prompt_token_ids"]
    assert found[0] is None
    for token_id, token in zip(prompt[1:], found[1:], strict=True):
        assert set(token) == {str(token_id), "10"}
        assert set(token["10"]) == {"logprob", "rank", "decoded_token"}
    assert answer["choices"][0]["logprobs"] is None


def test_a_stop_string_hides_the_text_and_not_the_tokens(tokenizer: Tokenizer) -> None:
    """A chunk without text still brings the log-probabilities of what is held back."""
    body = {"prompt": TEXT, "max_tokens": 8, "logprobs": 1, "stop": "the water wheel turns on", "stream": True}
    chunks = events(post(tokenizer, COMPLETIONS, body))
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 8
