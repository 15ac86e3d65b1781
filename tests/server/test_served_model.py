"""A real server on a tiny model, driven by the official client of the API."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess

PROMPT = "the water wheel turns"
MESSAGES: Any = [{"role": "user", "content": "why does the river run"}]
EXACT: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.models.retrieve("other")


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, **EXACT}
    whole = client.completions.create(**arguments)
    text, usage = "", None
    for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].text
    assert len(text) > 5
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.choices[0].finish_reason == "length"


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, **EXACT}
    whole = client.chat.completions.create(**arguments)
    text, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert whole.choices[0].message.role == "assistant"
    assert text == whole.choices[0].message.content
    assert [reason for reason in reasons if reason] == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.total_tokens == 24 + usage.prompt_tokens


def test_the_prefix_cache_shows_in_usage(client: openai.OpenAI, server: ServerProcess) -> None:
    """A prompt of 3 blocks three times: identical answers, and never all of it cached."""
    prompt = [3 + (7 * index) % 180 for index in range(48)]
    arguments: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answers = [client.completions.create(**arguments) for _ in range(3)]
    assert len({answer.choices[0].text for answer in answers}) == 1
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached == [0, 32, 32]


def test_several_answers_of_a_seed(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0.8, "seed": 42, "n": 3}
    first, again = (client.completions.create(**arguments, extra_body={"ignore_eos": True}) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]
    assert first.usage is not None
    assert first.usage.completion_tokens == 48


def test_a_seeded_answer_does_not_depend_on_its_mates(server: ServerProcess) -> None:
    async def work() -> list[str]:
        async with server.async_client() as client:

            async def one(**parameters: Any) -> str:
                answer = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=20, extra_body={"ignore_eos": True}, **parameters
                )
                return answer.choices[0].text

            mine: Any = {"temperature": 0.8, "seed": 42}
            alone = await one(**mine)
            mates = [one(temperature=1.0), one(temperature=0), one(temperature=0.8, seed=7)]
            return [alone, (await asyncio.gather(*mates, one(**mine)))[-1]]

    alone, together = asyncio.run(work())
    assert alone == together


def test_a_stop_string_cut_across_tokens(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, **EXACT}
    text = client.completions.create(**arguments).choices[0].text
    stop = text[6:11]
    assert len(stop) == 5
    expected = text[: text.index(stop)]
    chunks = list(client.completions.create(**arguments, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_dump()["stop_reason"] == stop
    near_miss = stop[:-1] + "\x01"
    chunks = list(client.completions.create(**arguments, stop=near_miss, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_tokens_and_texts(server: ServerProcess) -> None:
    tokens = server.post("/tokenize", json={"prompt": PROMPT}).json()
    assert tokens["max_model_len"] == 256
    assert server.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}


def test_many_streams_and_none_mixed_up(server: ServerProcess) -> None:
    """50 at a time on 8 seats, every third dropped in the middle: the others get what they would get alone."""
    prompts = [[3 + index, 100 - index, 7] for index in range(50)]
    arguments: Any = {"model": "tiny", "max_tokens": 20, **EXACT}
    arguments["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

    async def work() -> list[list[int] | None]:
        async with server.async_client() as client:

            async def one(index: int) -> list[int] | None:
                ids: list[int] = []
                stream = await client.completions.create(prompt=prompts[index], stream=True, **arguments)
                async for chunk in stream:
                    ids += chunk.choices[0].model_dump()["token_ids"]
                    if index % 3 == 1 and len(ids) >= 5:
                        await stream.close()
                        return None
                return ids

            return await asyncio.gather(*map(one, range(50)))

    found = asyncio.run(work())
    server.wait_idle()
    with server.client() as client:
        for index in range(0, 50, 7):
            answer = client.completions.create(prompt=prompts[index], **arguments)
            if index % 3 != 1:
                assert found[index] == answer.choices[0].model_dump()["token_ids"]
    assert [ids is None for ids in found] == [index % 3 == 1 for index in range(50)]
    assert all(ids is None or len(ids) == 20 for ids in found)


def test_clients_that_leave_give_everything_back(server: ServerProcess) -> None:
    """One in the middle of its answer, nine more that run or wait, and one that waits for a whole answer."""
    before = server.metric("generation_tokens_total")
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": [5, 6, 7], "max_tokens": 250, "ignore_eos": True}

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http:

            async def leave(num_chunks: int) -> None:
                async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                    count = 0
                    async for line in response.aiter_lines():
                        count += line.startswith("data:")
                        if count >= num_chunks:
                            return

            async def impatient() -> None:
                with pytest.raises(httpx.ReadTimeout):
                    await http.post("/v1/completions", json={**body, "n": 4}, timeout=0.1)

            await asyncio.gather(*(leave(5) for _ in range(10)), impatient())

    asyncio.run(work())
    server.wait_idle()
    assert server.metric("generation_tokens_total") - before < 14 * 250 * 0.8


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": [191, 192]}', 400),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"500": 1}}', 400),
        (b'{"model": "tiny", "prompt": "a", "zzz": 1}', 400),
        (b'{"model": "tiny", "prompt": "' + b"long " * 500 + b'"}', 400),
        (b'{"model": "other", "prompt": "a"}', 404),
        (b"{", 400),
    ],
    ids=["nan", "prompt id", "bias id", "unknown", "too long", "model", "malformed"],
)
def test_bad_input_disturbs_nobody(server: ServerProcess, client: openai.OpenAI, content: bytes, status: int) -> None:
    arguments: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, **EXACT}
    expected = client.completions.create(**arguments).choices[0].text
    stream = client.completions.create(**arguments, stream=True)
    pieces = [next(iter(stream)).choices[0].text]
    response = server.post("/v1/completions", content=content)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == expected


def test_a_wrong_key(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model="tiny", prompt="a")


def test_health_answers_while_a_large_body_is_read(server: ServerProcess) -> None:
    body = json.dumps({"model": "tiny", "prompt": "the water wheel " * (5 * 2**20 // 16)}).encode()
    assert len(body) > 5 << 20
    found: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: found.append(server.post("/v1/completions", content=body)))
    slowest = 0.0
    with httpx.Client(base_url=server.url) as http:
        http.get("/health")  # the connection is there
        sender.start()
        while sender.is_alive():
            begin = time.perf_counter()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - begin)
            time.sleep(0.005)
    sender.join()
    assert found[0].status_code == 400
    assert "max_model_len (256)" in found[0].json()["error"]["message"]
    assert slowest < 0.2


def test_the_port_is_taken(server: ServerProcess, tiny_text_model: Path, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    with ServerProcess(tiny_text_model, tmp_path / "log", "--port", port) as second:
        assert second.wait() == 1
    assert "noria: error: cannot listen at 127.0.0.1:" in second.log.read_text()
