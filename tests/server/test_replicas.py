"""Which replica gets which request, and answers that come from one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import service

from noria.cli.serve import main
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.server.replicas.relay import AnswerHead, RelayedRequest, answer
from noria.server.replicas.resources import check_room, resources_of, say
from noria.server.replicas.routing import SLACK_REQUESTS, preferred, routing_key
from noria.server.settings import ServerConfig
from noria.text.tokenizer import Tokenizer

REPLICAS = ["a", "b", "c", "d"]


def key(**body: Any) -> str | None:
    return routing_key(json.dumps(body).encode())


def chat(*turns: str, system: str = "You turn wheels.") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


def test_what_begins_alike_has_one_key() -> None:
    first = key(messages=chat("Hello"), max_tokens=5)
    assert first is not None
    assert key(messages=chat("Hello", "Hi.", "More?"), temperature=0) == first
    assert key(messages=chat("Hallo")) != first
    assert key(messages=chat("Hello", system="")) != first
    assert key(messages=chat("Hello"), cache_salt="mine") != first
    assert key(input="Hello", instructions="x") == key(input="Hello", instructions="x", stream=True)
    assert key(input=chat("Hello")) is not None
    long = "the water wheel " * 20
    assert key(prompt=long + "a") == key(prompt=long + "b") != key(prompt="the water")
    assert key(prompt=[*range(70), 1]) == key(prompt=[*range(70), 2]) == key(prompt=[[*range(70)], [3]])
    assert key(prompt=["one", "two"]) == key(prompt="one")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b'{"prompt": []}', b'{"model": "m"}', b"\xff", b"[" * 9000])
def test_a_body_without_a_beginning_has_none(body: bytes) -> None:
    assert routing_key(body) is None


def test_keys_are_spread_and_stay_when_a_replica_goes() -> None:
    idle = dict.fromkeys(REPLICAS, 0)
    keys = [f"key {number}" for number in range(2000)]
    chosen = {each: preferred(each, idle)[0] for each in keys}
    assert all(400 < count < 600 for count in Counter(chosen.values()).values())
    without = {replica: 0 for replica in REPLICAS if replica != "b"}
    for each, replica in chosen.items():
        order = preferred(each, idle)
        assert sorted(order) == REPLICAS
        assert preferred(each, without) == [other for other in order if other != "b"]
        assert replica == order[0]


def test_the_much_busier_one_is_passed_over() -> None:
    first, second, *_ = preferred("k", dict.fromkeys(REPLICAS, 0))
    loads = dict.fromkeys(REPLICAS, 0) | {first: SLACK_REQUESTS}
    assert preferred("k", loads)[0] == first
    loads[first] += 1
    assert preferred("k", loads)[0] == second
    assert preferred("k", loads)[-1] == first
    everybody = dict.fromkeys(REPLICAS, 100) | {first: 150}  # half as much again
    assert preferred("k", everybody)[0] == first
    assert preferred(None, {"a": 2, "b": 1, "c": 1}) == ["b", "c", "a"]
    assert preferred("k", {}) == []


def test_one_hot_beginning_spreads_no_further_than_it_must() -> None:
    """Requests that all begin alike: at first slower than they are answered, then faster."""
    rng = random.Random(1)
    loads = dict.fromkeys(REPLICAS, 0)
    used = set()
    for number in range(600):
        chosen = preferred("hot", loads)[0]
        assert loads[chosen] <= SLACK_REQUESTS + 1.5 * min(loads.values())
        loads[chosen] += 1
        used.add(chosen)
        if sum(loads.values()) > (6 if number < 200 else 60):
            loads[rng.choice([replica for replica in REPLICAS if loads[replica]])] -= 1
        assert len(used) == 1 or number >= 200
    assert len(used) == 4


def relayed(body: dict[str, Any], *headers: tuple[bytes, bytes]) -> RelayedRequest:
    content = json.dumps(body).encode()
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *headers]
    return RelayedRequest("POST", "/v1/completions", b"", given, content, "127.0.0.1")


def test_an_answer_crosses_in_parts(tokenizer: Tokenizer) -> None:
    async def ask(body: dict[str, Any]) -> tuple[AnswerHead, list[bytes]]:
        async with service(tokenizer, api_key=("k",)) as running:
            key = (b"authorization", b"Bearer k")
            head, *rest = [part async for part in answer(running.app, relayed(body, key, (b"x-request-id", b"seven")))]
            assert isinstance(head, AnswerHead)
            refused, *_ = [part async for part in answer(running.app, relayed(body))]
            assert isinstance(refused, AnswerHead)
            assert refused.status == 401
            return head, rest  # type: ignore[return-value]

    prompt = [10, 11, 12]
    head, parts = asyncio.run(ask({"prompt": prompt, "max_tokens": 4, "return_token_ids": True}))
    assert head.status == 200
    assert (b"x-request-id", b"seven") in head.headers
    assert json.loads(b"".join(parts))["choices"][0]["token_ids"] == [10, 11, 12, 10]
    head, parts = asyncio.run(ask({"prompt": prompt, "max_tokens": 4, "stream": True}))
    assert len(parts) >= 4
    assert parts[-1].strip() == b"data: [DONE]"
    head, _ = asyncio.run(ask({"prompt": prompt, "max_tokens": -4}))
    assert head.status == 400


def test_leaving_an_answer_aborts_it(tokenizer: Tokenizer) -> None:
    async def leave() -> None:
        async with service(tokenizer) as running:
            parts = answer(running.app, relayed({"prompt": [10], "max_tokens": 100, "stream": True}))
            assert isinstance(await anext(parts), AnswerHead)
            await anext(parts)
            await parts.aclose()
            for _ in range(200):
                if not running.app.state.noria.engine.num_unfinished:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("it still runs")

    asyncio.run(leave())


def test_bad_options(tiny_text_model: Path) -> None:
    with pytest.raises(ConfigError, match="replicas must be at least 1"):
        ServerConfig(replicas=0)
    with pytest.raises(ConfigError, match="replicas need a port"):
        ServerConfig(replicas=2, port=0)
    for rank in ("0", "1"):  # before one that follows waits for a host that never comes
        with pytest.raises(ConfigError, match="replicas and nnodes cannot be used together"):
            main([str(tiny_text_model), "--replicas", "2", "--nnodes", "2", "--node-rank", rank])


def test_a_replica_takes_all_devices_of_its_mesh() -> None:
    cluster = {"CPU": 16.0, "TPU": 8.0}
    sizes = {"data_parallel_size": 2, "attention_data_parallel_size": 2, "tensor_parallel_size": 2}
    assert resources_of(EngineConfig(model="m"), cluster) == {"TPU": 1.0}
    assert resources_of(EngineConfig(model="m", expert_parallel_size=4), cluster) == {"TPU": 4.0}
    needs = resources_of(EngineConfig(model="m", **sizes), cluster)
    assert (needs, say(needs)) == ({"TPU": 8.0}, "8 TPU")
    check_room(needs, 1, cluster)
    with pytest.raises(ConfigError, match=r"replicas \(2\) need 16 TPU, but the Ray cluster has 8; start fewer"):
        check_room(needs, 2, cluster)
    assert resources_of(EngineConfig(model="m", device="cpu", **sizes), cluster) == {"CPU": 1.0}


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray(tiny_text_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"replicas need the package ray; install .*noria\[ray\]"):
        main([str(tiny_text_model), "--replicas", "2"])
