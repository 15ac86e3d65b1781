"""/v1/chat/completions, /tokenize and /detokenize on an engine that repeats its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import MAX_MODEL_LEN, ask
from test_completion_route import events, parrot

from noria.text.chat import encode_chat
from noria.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "why"}]


def chat(tokenizer: Tokenizer, **body: Any) -> dict[str, Any]:
    body = {"model": "parrot", "messages": QUESTION, "max_completion_tokens": 8, **body}
    response = ask(tokenizer, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    answer = chat(tokenizer, n=2)
    ids = encode_chat(tokenizer, QUESTION)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    skipped = [parrot_without_specials(tokenizer, ids, 8, index) for index in range(2)]
    assert [choice["message"] for choice in answer["choices"]] == [
        {"role": "assistant", "content": text} for text in skipped
    ]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 16
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def parrot_without_specials(tokenizer: Tokenizer, ids: list[int], count: int, index: int = 0) -> str:
    return parrot(tokenizer, ids, count, index)  # decode leaves special tokens out, as the engine does


def test_a_stream_is_the_whole_answer_in_pieces(tokenizer: Tokenizer) -> None:
    body = {"messages": QUESTION, "max_tokens": 12, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(ask(tokenizer, "POST", "/v1/chat/completions", json=body))
    whole = chat(tokenizer, max_completion_tokens=12, n=2)
    for index in range(2):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in delta for delta in deltas[1:])
        assert "".join(delta["content"] for delta in deltas) == whole["choices"][index]["message"]["content"]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]].count("length") == 2
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_an_answer_may_be_as_long_as_the_model_allows(tokenizer: Tokenizer) -> None:
    for limit in ({}, {"max_completion_tokens": None}):
        body = {"messages": QUESTION, **limit}
        usage = ask(tokenizer, "POST", "/v1/chat/completions", json=body).json()["usage"]
        assert usage["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "why"}], [{"type": "text", "text": "w"}, {"type": "text", "text": "hy"}]]
)
def test_parts_of_a_content(tokenizer: Tokenizer, content: list[dict[str, str]]) -> None:
    answer = chat(tokenizer, messages=[{"role": "user", "content": content}])
    text = "\n".join(part["text"] for part in content)
    expected = chat(tokenizer, messages=[{"role": "user", "content": text}])
    assert answer["choices"] == expected["choices"]
    assert answer["usage"] == expected["usage"]


def test_a_developer_is_the_system(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *QUESTION]
    ids = encode_chat(tokenizer, [{"role": "system", "content": "be brief"}, *QUESTION])
    answer = chat(tokenizer, messages=messages, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids


def test_the_template_may_be_told_more(tokenizer: Tokenizer) -> None:
    answer = chat(tokenizer, add_generation_prompt=False, return_token_ids=True, chat_template_kwargs={"colour": "red"})
    ids = encode_chat(tokenizer, QUESTION, add_generation_prompt=False)
    assert answer["choices"][0]["prompt_token_ids"] == ids


def test_values_that_ask_for_nothing_are_accepted(tokenizer: Tokenizer) -> None:
    asked = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "logprobs": False,
        "store": False,
        "parallel_tool_calls": True,
        "metadata": {},
        "service_tier": "auto",
        "frequency_penalty": 0,
    }
    assert chat(tokenizer, **asked)["choices"] == chat(tokenizer)["choices"]


def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    text = "the water wheel, 水車"
    answer = ask(tokenizer, "POST", "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    back = ask(tokenizer, "POST", "/detokenize", json={"model": "polly", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


def test_tokenize_a_conversation(tokenizer: Tokenizer) -> None:
    answer = ask(tokenizer, "POST", "/tokenize", json={"messages": QUESTION}).json()
    assert answer["tokens"] == encode_chat(tokenizer, QUESTION)
    assert answer["token_strs"] is None
    answer = ask(tokenizer, "POST", "/tokenize", json={"prompt": "why", "add_special_tokens": False}).json()
    assert answer["tokens"] == tokenizer.encode("why", add_special_tokens=False)
