"""noria bench serve against noria serve: what the client counts is what the server did."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from server_process import ServerProcess

from noria.cli.main import main

Bench = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def bench(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(*args: str, key: str = "secret") -> tuple[int, dict[str, Any], str]:
        sizes = ("--random-input-len", "20", "--random-output-len", "8", "--num-prompts", "12")
        status = main(["bench", "serve", "--base-url", server.url, "--api-key", key, *sizes, *args, "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else {}, err

    return run


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_counts_agree(server: ServerProcess, bench: Bench, endpoint: str) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [server.metric(name) for name in names]
    status, found, err = bench("--endpoint", endpoint, "--ignore-eos", "--max-concurrency", "4")
    assert status == 0, err
    prompt, generated, requests = (server.metric(name) - known for name, known in zip(names, before))
    assert (found["completed"], found["model_id"]) == (12, "tiny")
    assert found["total_output_tokens"] == 12 * 8 == generated - 1  # one token to see whether the server answers
    assert requests == 13
    assert 0 < found["total_input_tokens"] < prompt
    assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"]
    assert found["mean_tpot_ms"] > 0
    server.wait_idle()


def test_a_wrong_key_is_told_before_the_run(bench: Bench) -> None:
    status, found, err = bench(key="wrong")
    assert (status, found) == (1, {})
    assert "GET /v1/models was answered with status 401: a valid API key is missing" in err
