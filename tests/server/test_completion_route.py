"""/v1/completions on an engine that repeats its prompt: every form of a prompt, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import ask, run, service

from noria.text.tokenizer import Tokenizer

TEXT = "the water wheel turns"


def parrot(tokenizer: Tokenizer, prompt: str | list[int], count: int, index: int = 0) -> str:
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return tokenizer.decode([ids[(index + i) % len(ids)] for i in range(count)], continuation=True)


def complete(tokenizer: Tokenizer, **body: Any) -> dict[str, Any]:
    response = ask(tokenizer, "POST", "/v1/completions", json={"model": "parrot", "prompt": TEXT, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def stream(tokenizer: Tokenizer, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "parrot", "prompt": TEXT, "stream": True, **body}
    return events(ask(tokenizer, "POST", "/v1/completions", json=body))


def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    answer = complete(tokenizer, max_tokens=9, user="somebody")
    num_prompt = len(tokenizer.encode(TEXT))
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "parrot"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": parrot(tokenizer, TEXT, 9),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 9,
        "total_tokens": num_prompt + 9,
        "prompt_tokens_details": {"cached_tokens": (num_prompt - 1) // 16 * 16},
    }


def test_sixteen_tokens_unless_told_otherwise(tokenizer: Tokenizer) -> None:
    assert complete(tokenizer)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompts",
    [["flour", TEXT], [[9, 8, 7], [50, 51]], ["flour"], [[9, 8, 7]]],
    ids=["texts", "ids", "one text in a list", "one list of ids"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_lists_of_prompts(tokenizer: Tokenizer, prompts: list[Any], streamed: bool) -> None:
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "echo": True}
    if streamed:
        texts = [""] * 2 * len(prompts)
        for chunk in stream(tokenizer, **body):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        answer = complete(tokenizer, **body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
        texts = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == 8 * len(prompts)
    expected = []
    for prompt in prompts:
        beginning = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        expected += [beginning + parrot(tokenizer, prompt, 4, index) for index in range(2)]
    assert texts == expected


def test_token_ids_as_a_prompt(tokenizer: Tokenizer) -> None:
    answer = complete(tokenizer, prompt=[9, 8, 7], max_tokens=4, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["token_ids"] == [9, 8, 7, 9]
    assert choice["prompt_token_ids"] == [9, 8, 7]
    assert choice["text"] == tokenizer.decode([9, 8, 7, 9], continuation=True)


def test_a_stream_is_the_whole_answer_in_pieces(tokenizer: Tokenizer) -> None:
    body = {"n": 3, "max_tokens": 11, "echo": True}
    chunks = stream(tokenizer, **body, stream_options={"include_usage": True}, return_token_ids=True)
    whole = complete(tokenizer, **body)
    *parts, last = chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in parts)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    texts, token_ids, reasons = [""] * 3, [[], [], []], [None] * 3
    for chunk in parts:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        token_ids[choice["index"]] += choice["token_ids"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length"] * 3
    assert [len(ids) for ids in token_ids] == [11] * 3


def test_usage_comes_only_when_it_is_asked_for(tokenizer: Tokenizer) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert not any("usage" in chunk for chunk in stream(tokenizer, max_tokens=2, **options))


def test_others_get_their_turn_between_the_prompts_of_a_long_list(tokenizer: Tokenizer) -> None:
    async def work() -> list[int]:
        ticks, seen = 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async with service(tokenizer) as running:
            prepare = running.engine.prepare

            async def watched(*arguments: Any) -> Any:
                seen.append(ticks)
                return await prepare(*arguments)

            running.engine.prepare = watched  # type: ignore[method-assign]
            ticker = asyncio.ensure_future(tick())
            response = await running.http.post("/v1/completions", json={"prompt": [TEXT] * 20, "max_tokens": 1})
            ticker.cancel()
            assert response.status_code == 200
        return seen

    seen = run(work())
    assert len(seen) == len(set(seen)) == 20


FOX = "The quick brown fox"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("own fox", "The quick br", "own fox"),
        (["zzz", "ck b"], "The qui", "ck b"),
        ("own foxes", FOX, None),  # a near miss is flushed whole
    ],
)
def test_a_stop_string_is_never_seen_however_the_text_is_cut(
    tokenizer: Tokenizer, stop: Any, text: str, reason: str | None
) -> None:
    say = [token for letter in FOX for token in tokenizer.encode(letter)]  # a character a token, all held back in turn

    async def work() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        async with service(tokenizer) as running:
            running.core.script[9, 8] = say
            body = {"prompt": [9, 8], "max_tokens": len(say), "stop": stop}
            streamed = await running.http.post("/v1/completions", json={**body, "stream": True})
            whole = await running.http.post("/v1/completions", json=body)
            return events(streamed), whole.json()

    chunks, whole = run(work())
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text == whole["choices"][0]["text"]
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop" if reason else "length", reason)
    assert len(pieces) > 2


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    word = "日本é"
    say = tokenizer.encode(word + "a")
    assert len(say) > len(word) + 1  # else the test shows nothing

    async def work() -> list[dict[str, Any]]:
        async with service(tokenizer) as running:
            running.core.script[9, 8] = say
            body = {"prompt": [9, 8], "max_tokens": len(say), "stream": True}
            return events(await running.http.post("/v1/completions", json=body))

    pieces = [chunk["choices"][0]["text"] for chunk in run(work())]
    assert "".join(pieces) == word + "a"
    assert not any("\ufffd" in piece for piece in pieces)


def test_parameters_reach_the_engine(tokenizer: Tokenizer) -> None:
    body = {
        "prompt": [9, 8],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 2**63,
        "max_tokens": 7.0,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop": "x",
        "include_stop_str_in_output": True,
        "cache_salt": "mine",
        "n": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [5, 6],
        "bad_words": ["mill"],
        "logit_bias": {"5": 2.5},
    }

    async def work() -> Any:
        async with service(tokenizer, step_s=0.002) as running:
            task = asyncio.ensure_future(running.http.post("/v1/completions", json=body))
            await running.steps(1)
            [request] = running.core.running
            await task
            return request

    request = run(work())
    params = request.sampling_params
    for name in body.keys() - {"prompt", "cache_salt", "stop", "logit_bias"}:
        found = getattr(params, name)
        assert (list(found) if isinstance(found, tuple) else found) == body[name], name
    assert params.stop_strings == ("x",)
    assert params.logit_bias == ((5, 2.5),)
    assert request.cache_salt == "mine"


def test_null_is_the_default(tokenizer: Tokenizer) -> None:
    names = ("max_tokens", "temperature", "stop", "seed", "n", "stream", "echo", "logit_bias", "user", "best_of")
    assert complete(tokenizer, **dict.fromkeys(names))["choices"] == complete(tokenizer)["choices"]


def test_values_that_ask_for_nothing_are_accepted(tokenizer: Tokenizer) -> None:
    """What clients send because it is the default of their own."""
    asked = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "suffix": ""}
    assert complete(tokenizer, **asked)["choices"] == complete(tokenizer)["choices"]
