"""Servers that are killed, frozen, told to go, or cannot start."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, is_alive, wait_for

LONG: Any = {
    "prompt": [5, 6, 7],
    "max_tokens": 250,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def restarting(tiny_text_model: Path, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts an engine that died again; calls one silent for a second frozen."""
    log = tmp_path_factory.mktemp("restarting") / "log"
    with ServerProcess(tiny_text_model, log, *small, "--engine-timeout", "1") as server:
        server.wait_ready()
        yield server


def busy(server: ServerProcess, count: int) -> tuple[ThreadPoolExecutor, list[Any]]:
    """Streams that run until they end or fail; returns when all are accepted and the first has begun."""
    begun, accepted = threading.Event(), threading.Semaphore(0)

    def one() -> int:
        with server.client() as client:
            stream = client.completions.create(model=client.models.list().data[0].id, **LONG)
            accepted.release()
            usage = None
            for chunk in stream:
                begun.set()
                usage = chunk.usage
        assert usage is not None
        return usage.completion_tokens

    pool = ThreadPoolExecutor(count)
    answers = [pool.submit(one) for _ in range(count)]
    for _ in range(count):
        while not accepted.acquire(timeout=0.1):
            for answer in answers:
                if answer.done():
                    answer.result()  # raises why it was not accepted
    assert begun.wait(30)
    return pool, answers


def check_killed(answers: list[Any]) -> None:
    """All are told so at once, but for those that were answered before."""
    errors = [error for answer in answers if (error := answer.exception(5)) is not None]
    assert errors
    assert all(isinstance(error, openai.APIError) and "SIGKILL" in str(error) for error in errors), errors


def test_a_frozen_engine_turns_readiness_red(restarting: ServerProcess) -> None:
    pid = restarting.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        wait_for(lambda: not restarting.is_ready(), 5)
        assert time.monotonic() - begin < 3
        assert restarting.get("/health").status_code == 200
        response = restarting.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(restarting.is_ready, 5)
    assert restarting.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_killed_engine_is_an_error_at_once_and_comes_back(restarting: ServerProcess) -> None:
    expected = restarting.post("/v1/completions", json={"prompt": "mill", "temperature": 0}).json()["choices"]
    pool, answers = busy(restarting, 12)
    pid = restarting.engine_pid
    assert pid is not None
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pool:
        check_killed(answers)
    assert time.monotonic() - begin < 3
    assert restarting.get("/ready").status_code == 503
    assert restarting.get("/health").status_code == 200
    restarting.wait_ready()
    assert restarting.engine_pid != pid
    assert restarting.post("/v1/completions", json={"prompt": "mill", "temperature": 0}).json()["choices"] == expected
    assert "starting it again" in restarting.log.read_text()


def test_sigterm_finishes_what_runs(restarting: ServerProcess) -> None:
    """The last test of this server."""
    engine = restarting.engine_pid
    assert engine is not None
    pool, answers = busy(restarting, 12)
    restarting.signal(signal.SIGTERM)
    wait_for(lambda: restarting.get("/ready").status_code == 503, 5, pause_s=0)
    refused = restarting.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    with pool:
        assert [answer.result(30) for answer in answers] == [250] * 12
    assert restarting.wait() == 0
    assert not is_alive(engine)
    with pytest.raises(httpx.TransportError):
        restarting.get("/health")
    assert "Traceback" not in restarting.log.read_text()


def test_a_server_that_ends_with_its_engine_and_cuts_off_what_takes_too_long(
    tiny_text_model: Path, small: list[str], tmp_path: Path
) -> None:
    options = [*small, "--on-engine-death", "exit", "--drain-timeout", "0.2"]
    with ServerProcess(tiny_text_model, tmp_path / "first", *options) as server:
        server.wait_ready()
        pool, answers = busy(server, 4)
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        with pool:
            check_killed(answers)
        assert server.wait() == 1
        assert server.log.read_text().splitlines()[-1].startswith("noria: error: the engine has ended: its process was")
    with ServerProcess(tiny_text_model, tmp_path / "second", *options) as server:
        server.wait_ready()
        pool, answers = busy(server, 30)
        server.signal(signal.SIGTERM)
        with pool:
            ended = [answer.exception(15) for answer in answers]
        assert server.wait() == 0
        assert any(isinstance(error, openai.APIError) for error in ended)
        assert "cut off" in server.log.read_text()


def test_an_engine_does_not_outlive_a_killed_server(tiny_text_model: Path, small: list[str], tmp_path: Path) -> None:
    with ServerProcess(tiny_text_model, tmp_path / "log", *small) as server:
        wait_for(lambda: server.url and server.engine_pid, 60)
        engine = server.engine_pid
        assert engine is not None
        server.signal(signal.SIGKILL)
        server.wait()
        wait_for(lambda: not is_alive(engine), 15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "100000"], "max_model_len (100000) exceeds"),
        (["--num-blocks-override", "3"], "raise num_blocks_override"),
    ],
)
def test_options_that_only_the_engine_can_judge(
    tiny_text_model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    with ServerProcess(tiny_text_model, tmp_path / "log", *options) as server:
        assert server.wait(60) == 1
    log = server.log.read_text()
    assert log.splitlines()[-1].startswith("noria: error: ")
    assert message in log.splitlines()[-1]
    assert "Traceback" not in log
