"""Cases in which servers like this one have gone wrong: odd budgets, first requests of a kind, pools too small."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

SMALL_POOL = ["--num-blocks-override", "26"]  # 25 blocks of 16 for requests
ODD, EVEN = ["--max-num-batched-tokens", "317"], ["--max-num-batched-tokens", "512"]
FIRST_OF_ITS_KIND: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3, "logit_bias": {"7": 2.0}},
    {"prompt_logprobs": 3},
    {"bad_words": ["mill"], "min_tokens": 3, "seed": 5},
    {"structured_outputs": {"regex": "[a-f]{4,8}"}},
    {"response_format": {"type": "json_object"}},
)


@pytest.fixture(scope="module")
def long_model(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with places for 512 tokens."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_text_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def options(compile_cache_dir: str) -> list[str]:
    sizes = ["--max-model-len", "384", "--max-num-seqs", "8", "--block-size", "16", "--dtype", "float32"]
    return [*sizes, *SMALL_POOL, "--strict-compile", "--compile-cache-dir", compile_cache_dir]


def started(model: Path, log: Path, *options: str) -> Iterator[ServerProcess]:
    with ServerProcess(model, log, *options) as server:
        server.wait_ready()
        yield server
        assert server.metric("compiles_after_warmup_total") == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def odd(long_model: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from started(long_model, tmp_path_factory.mktemp("odd") / "log", *options, *ODD)


@pytest.fixture(scope="module")
def even(long_model: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its programs are the same. One request at a time has all the room it wants."""
    yield from started(long_model, tmp_path_factory.mktemp("even") / "log", *options, *EVEN)


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + 11 * index) % 180 for index in range(length)]


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.text, parse_constant=refuse)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_the_first_request_of_each_kind_compiles_nothing(odd: ServerProcess) -> None:
    for parameters in FIRST_OF_ITS_KIND:
        complete(odd, prompt=prompt(20), max_tokens=8, **parameters)
        assert odd.metric("compiles_after_warmup_total") == 0, parameters


@pytest.mark.parametrize("length", [316, 317, 318])
def test_prompts_around_a_budget_that_is_no_bucket(odd: ServerProcess, even: ServerProcess, length: int) -> None:
    found, expected = (
        complete(server, prompt=prompt(length), max_tokens=12)["choices"][0]["token_ids"] for server in (odd, even)
    )
    assert found == expected
    assert len(found) == 12


def test_a_pool_for_two_of_four_requests(odd: ServerProcess, even: ServerProcess) -> None:
    """Preempted, the answers are what they are with room for all, and every token is streamed and counted once."""

    async def stream(server: ServerProcess, index: int) -> tuple[list[int], int]:
        ids: list[int] = []
        arguments: Any = {"model": str(server.get("/v1/models").json()["data"][0]["id"]), "stream": True}
        extra = {"ignore_eos": True, "return_token_ids": True}
        async with server.async_client() as client:
            chunks = await client.completions.create(
                prompt=prompt(100, 40 * index),
                max_tokens=64,
                temperature=0,
                stream_options={"include_usage": True},
                extra_body=extra,
                **arguments,
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    ids += choice.model_dump()["token_ids"]
                usage = chunk.usage
        return ids, usage.completion_tokens

    async def together() -> list[tuple[list[int], int]]:
        return await asyncio.gather(*(stream(odd, index) for index in range(4)))

    async def one_by_one() -> list[tuple[list[int], int]]:
        return [await stream(even, index) for index in range(4)]

    answers = asyncio.run(together())
    assert odd.metric("num_preemptions_total") > 0
    assert answers == asyncio.run(one_by_one())
    assert even.metric("num_preemptions_total") == 0
    assert [(len(ids), count) for ids, count in answers] == [(64, 64)] * 4


@pytest.mark.parametrize("streamed", [False, True])
def test_figures_of_a_sampler_that_leaves_one_token(server: ServerProcess, streamed: bool) -> None:
    """What top_k excludes has a logit of minus infinity; the figures are of the model and finite."""
    body = {"prompt": "the water", "max_tokens": 6, "echo": True, "logprobs": 5, "top_k": 1, "stream": streamed}
    text = server.post("/v1/completions", json=body).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line] if streamed else [text]
    chunks = [json.loads(event, parse_constant=refuse) for event in events if event != "[DONE]"]
    figures = [value for chunk in chunks for value in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert figures[0] is None
    assert all(-1000 < value <= 0 for value in figures[1:])
    assert len(figures) > 6
