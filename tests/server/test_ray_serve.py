"""Two replicas under Ray Serve: `noria serve --replicas 2` in a process. Needs the extra ray."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_two_replicas_answer_at_one_address(tiny_text_model: Path, small: list[str], tmp_path: Path) -> None:
    more = ["--replicas", "2", "--port", str(free_port()), "--api-key", "secret", "--served-model-name", "tiny"]
    with ServerProcess(tiny_text_model, tmp_path / "log", *small, *more) as server:
        wait_for(lambda: " at http" in server.log.read_text(), 300, server._is_running, 1.0)
        body: dict[str, Any] = {"model": "tiny", "prompt": "the water wheel turns and " * 3, "temperature": 0}
        first, *again = [server.post("/v1/completions", json=body).json() for _ in range(6)]
        cached = lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached(first) == 0
        assert all(answer["choices"] == first["choices"] for answer in again)
        # Nearly all come to the replica that knows the beginning: on a busy machine Ray may not hear from it in time.
        ask = lambda number: server.post(
            "/v1/completions", json=body | {"prompt": f"{number} " + body["prompt"]}
        ).json()
        twice = [(ask(number), ask(number)) for number in range(12)]
        assert all(cached(first) < 16 for first, _ in twice)
        assert sum(cached(second) >= 16 for _, second in twice) >= 10
        lines = server.get("/metrics").text.splitlines()  # of one of the replicas: the other has answered, too
        assert 0 < sum(float(line.split()[-1]) for line in lines if line.startswith("noria:request_success_total")) < 30
        lines = server.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
        assert text == first["choices"][0]["text"]
        assert server.post("/v1/completions", json=body | {"model": "other"}).status_code == 404
        assert server.post("/v1/completions", content=b"{").status_code == 400
        server.key = "wrong"
        assert server.post("/v1/completions", json=body).status_code == 401
        server.signal(signal.SIGTERM)
        assert server.wait(90) == 0
    # Ray itself sometimes complains of a client that has left after its answer.
    frames = [line for line in server.log.read_text().splitlines() if 'File "' in line]
    assert not [frame for frame in frames if "noria/server/" in frame or "noria/engine/" in frame]


def test_a_cluster_that_is_too_small(tiny_text_model: Path, small: list[str], tmp_path: Path) -> None:
    more = ["--replicas", "1000", "--port", str(free_port())]
    with ServerProcess(tiny_text_model, tmp_path / "log", *small, *more) as server:
        assert server.wait(120) == 1
    assert "replicas (1000) need 1000 CPU, but the Ray cluster has" in server.log.read_text()
