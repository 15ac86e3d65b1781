"""noria bench serve against a server that is told how to behave."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome
from scripted_server import CACHED, PARTS, ScriptedServer

Noria = Callable[..., Outcome]
SMALL = ("--random-input-len", "6", "--random-output-len", "4", "--num-prompts", "8")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def lines(noria: Noria, server: ScriptedServer, *args: str, status: int = 0) -> list[dict[str, Any]]:
    outcome = noria("bench", "serve", "--base-url", server.url, *SMALL, *args, "--json")
    assert outcome.status == status, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_completions(noria: Noria) -> None:
    with ScriptedServer("cached", step_s=0.01) as server:
        [found] = lines(noria, server, "--max-concurrency", "4", "--ignore-eos", "--extra-body", '{"top_k": 5}')
    assert (found["completed"], found["failed"], found["errors"]) == (8, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (48, 32)
    assert found["cached_tokens"] == 8 * CACHED
    assert found["output_throughput"] == pytest.approx(32 / found["duration"], rel=0.01)
    assert found["total_token_throughput"] == pytest.approx(80 / found["duration"], rel=0.01)
    assert found["request_throughput"] == pytest.approx(8 / found["duration"], rel=0.01)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{metric}_ms"] <= found[f"p90_{metric}_ms"] <= found[f"p99_{metric}_ms"]
    assert found["mean_ttft_ms"] >= 10
    assert found["mean_itl_ms"] >= 9
    assert found["mean_tpot_ms"] == pytest.approx(found["mean_itl_ms"] * (PARTS - 1) / 3, rel=0.01)  # four tokens
    assert found["mean_e2el_ms"] == pytest.approx(found["mean_ttft_ms"] + 2 * found["mean_itl_ms"], rel=0.01)
    assert found["client_cpu_share"] > 0
    assert (found["model_id"], found["request_rate"], found["max_concurrency"]) == ("scripted", "inf", 4)
    assert server.most == 4
    for body in server.asked:
        assert body["model"] == "scripted"
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["top_k"]) == (4, 0.0, True, 5)
        assert all(1000 <= token < 30000 for token in body["prompt"])
    assert len({tuple(body["prompt"]) for body in server.asked}) == 8


def test_chats_with_a_key_and_a_model(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    with ScriptedServer(step_s=0.02) as server:
        chat = ("--endpoint", "/v1/chat/completions", "--model", "mine")
        [found] = lines(noria, server, *chat, "--api-key", "secret")
        lines(noria, server, *chat)
    assert found["completed"] == 8
    assert found["mean_ttft_ms"] >= 20  # the chunk that holds a role alone is no token
    assert [*{len(body["messages"][0]["content"].split()) for body in server.asked[:8]}] == [6]
    assert {body["model"] for body in server.bodies} == {"mine"}
    keys = [headers["Authorization"] for headers in server.headers]
    assert keys == ["Bearer secret"] * 9 + ["Bearer of the environment"] * 9


def test_a_server_that_takes_no_token_ids_gets_text(noria: Noria) -> None:
    with ScriptedServer(takes_ids=False) as server:
        [found] = lines(noria, server)
        assert found["failed"] == 0
        assert {len(body["prompt"].split()) for body in server.bodies[2:]} == {6}
        refused = noria("bench", "serve", "--base-url", server.url, *SMALL, "--prompt-format", "ids")
        assert refused.error() == "the server failed at a first request (HTTP 400): prompt must be a string"


def test_no_error_ends_a_run_and_each_kind_is_counted(noria: Noria, tmp_path: Path) -> None:
    behaviours = (
        *("status 500", "status 429", "status 429", "cut", "error", "garbage", "no-usage", "no-done", "empty"),
        *("hang up", "stall", "not json", "good", "good"),
    )
    file = tmp_path / "result.json"
    with ScriptedServer(lambda number, body: behaviours[(number - 1) % len(behaviours)]) as server:
        args = ("--num-prompts", "14", "--max-concurrency", "1", "--request-timeout", "0.4", "--goodput", "ttft:5000")
        args = (*args, "--save-result", str(file), "--save-detailed")
        outcome = noria("bench", "serve", "--base-url", server.url, *SMALL, *args, "--json")
    assert outcome.status == 1
    found = json.loads(outcome.out)
    assert (found["completed"], found["failed"]) == (2, 12)
    assert found["errors"] == {
        "HTTP 500": 2,
        "HTTP 429": 2,
        "cut": 2,
        "error event": 1,
        "invalid": 1,
        "no usage": 1,
        "empty": 1,
        "connection": 1,
        "timeout": 1,
    }
    assert found["goodput_share"] == pytest.approx(2 / 14, abs=1e-4)
    assert found["total_output_tokens"] == 8
    assert "12 of 14 requests failed" in outcome.err
    assert "2 failed, HTTP 429: told to say 429" in outcome.err
    assert "1 failed, error event: the device is gone" in outcome.err
    assert "1 failed, timeout: no whole answer within 0.4 s" in outcome.err
    saved = json.loads(file.read_text())
    assert saved["model_id"] == "scripted"
    [run] = saved["runs"]
    assert found.items() <= run.items()
    assert len(run["ttfts"]) == len(run["itls"]) == 14
    assert sum(value is not None for value in run["ttfts"]) == 2
    assert run["error_details"][11] == "HTTP 500: <html> <b>oh</b> no</html>"


def test_a_table_and_a_picture(noria: Noria, tmp_path: Path) -> None:
    picture = tmp_path / "latency.svg"
    with ScriptedServer() as server:
        args = ("--goodput", "ttft:10000", "tpot:10000", "--plot", str(picture), "--percentile-metrics", "ttft,e2el")
        args = (*args, "--metric-percentiles", "75,99.5")
        outcome = noria("bench", "serve", "--base-url", server.url, *SMALL, *args)
    assert outcome.status == 0, outcome.err
    first, *rest = outcome.out.splitlines()
    assert first.startswith("all at once: 8 done, 0 failed")
    table = {line.split("  ")[0]: line for line in rest}
    assert "48 in, 32 out" in table["tokens"]
    assert "100.0% (ttft <= 10000 ms, tpot <= 10000 ms)" in table["goodput"]
    assert table["milliseconds"].split() == ["milliseconds", "mean", "median", "p75", "p99.5"]
    assert {"ttft", "e2el"} <= set(table)
    assert "itl" not in table
    assert "of a core" in outcome.err
    assert "Time to first token" in {text.text for text in ElementTree.parse(picture).iter() if text.text}


def test_a_sweep(noria: Noria, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    with ScriptedServer(step_s=0.002) as server:
        args = ("--max-concurrency", "1", "2", "4", "--plot", str(picture), "--num-warmups", "3")
        outcome = noria("bench", "serve", "--base-url", server.url, *SMALL, *args)
        assert outcome.status == 0, outcome.err
        asked = server.asked
        rates = lines(noria, server, "--request-rate", "200", "inf", "--burstiness", "0.5")
    heading, *rows = outcome.out.splitlines()
    assert heading.split()[:5] == ["load", "done", "failed", "s", "req/s"]
    assert [row.split()[:3] for row in rows] == [[number, "8", "0"] for number in ("1", "2", "4")]
    assert len(asked) == 3 + 3 * 8
    assert len({tuple(body["prompt"]) for body in asked}) == len(asked)  # nothing is answered from a prefix cache
    assert [line["request_rate"] for line in rates] == [200.0, "inf"]
    assert rates[0]["duration"] > 0.03
    shown = [text.text for text in ElementTree.parse(picture).iter()]
    assert shown.count("4") >= 8
    assert shown.count("output tokens per second") == 4


def test_prompts_repeat_with_the_seed_and_differ_without(noria: Noria) -> None:
    with ScriptedServer() as server:
        for seed in ("1", "1", "2"):
            lines(noria, server, "--seed", seed, "--max-concurrency", "1", "--random-range-ratio", "0.5")
        first, second, third = ([body["prompt"] for body in server.bodies[at + 1 : at + 9]] for at in (0, 9, 18))
    assert first == second != third


def test_shared_prefixes_and_files(noria: Noria, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two three", "output_tokens": 2}\n{"prompt": [5, 6]}\n')
    with ScriptedServer() as server:
        sizes = ("--prefix-repetition-prefix-len", "9", "--prefix-repetition-suffix-len", "3")
        sizes = (*sizes, "--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "5")
        [found] = lines(noria, server, "--dataset-name", "prefix_repetition", *sizes)
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (8 * 12, 8 * 5)
        assert len({tuple(body["prompt"][:9]) for body in server.asked}) == 2
        server.bodies.clear()
        args = ("--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "7")
        lines(noria, server, *args, "--num-prompts", "3", "--max-concurrency", "1")
        assert [(body["prompt"], body["max_tokens"]) for body in server.asked] == [
            ("one two three", 2),
            ([5, 6], 7),
            ("one two three", 2),
        ]
        chat = ("--endpoint", "/v1/chat/completions")
        refused = noria("bench", "serve", "--base-url", server.url, *args, *chat)
        assert "has prompts of token ids, which only /v1/completions takes" in refused.error()


def test_what_is_wrong_with_a_server_is_said_before_the_run(noria: Noria) -> None:
    closed = noria("bench", "serve", "--base-url", "http://127.0.0.1:9", *SMALL)
    assert closed.error().startswith("cannot reach http://127.0.0.1:9")
    with ScriptedServer() as server:
        server.models = {"data": []}
        none = noria("bench", "serve", "--base-url", server.url, *SMALL)
        assert none.error() == "the server's /v1/models names no model; name one with --model"
        server.models = b"<html>"
        assert "was not answered with JSON" in noria("bench", "serve", "--base-url", server.url, *SMALL).error()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--random-prefix-len", "-1"], "--random-prefix-len must be at least 0, not -1"),
        (["--base-url", "127.0.0.1:8000"], "--base-url must begin with http:// or https://, not '127.0.0.1:8000'"),
        (["--base-url", "http://here:port"], "--base-url is not a URL"),
        (["--endpoint", "/v1/embeddings"], "--endpoint must be /v1/completions or /v1/chat/completions"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be at least 0 and less than 1, not 1"),
        (["--request-rate", "0"], "--request-rate must be positive, not 0"),
        (["--request-rate", "nan"], "--request-rate must be positive"),
        (["--request-rate", "1", "2", "--max-concurrency", "1", "2"], "give several values of --request-rate or of"),
        (["--max-concurrency", "2", "0"], "--max-concurrency must be at least 1"),
        (["--burstiness", "0"], "--burstiness must be positive, not 0"),
        (["--request-timeout", "0"], "--request-timeout must be positive, not 0"),
        (["--dataset-name", "custom"], "--dataset-path and --dataset-name custom belong together"),
        (["--dataset-path", "x"], "--dataset-path and --dataset-name custom belong together"),
        (["--dataset-name", "sharegpt"], "--dataset-name: expected one of 'random', 'prefix_repetition', 'custom'"),
        (["--percentile-metrics", "ttft,wheel"], "--percentile-metrics: there is no 'wheel'; there are ttft, tpot"),
        (["--metric-percentiles", "90,101"], "--metric-percentiles must be numbers from 0 to 100"),
        (["--metric-percentiles", "high"], "--metric-percentiles must be numbers from 0 to 100"),
        (["--goodput", "itl:5"], "--goodput: there is no 'itl'; there are ttft, tpot, e2el"),
        (["--goodput", "ttft:fast"], "--goodput: 'ttft:fast' must be a metric and milliseconds"),
        (["--goodput", "ttft:1", "ttft:2"], "--goodput: ttft is given twice"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "--extra-body must not contain stream, which the benchmark sets"),
        (["--save-detailed"], "--save-detailed needs --save-result FILE"),
        (["--save-result", "no/such/folder/a.json"], "--save-result no/such/folder/a.json cannot be written"),
        (["--plot", "/"], "--plot / cannot be written"),
        (["--prompt-format", "ids", "--endpoint", "/v1/chat/completions"], "--prompt-format ids does not work with"),
        (["--max-concurency", "3"], "unknown option --max-concurency; did you mean --max-concurrency?"),
    ],
)
def test_a_wrong_command_line(noria: Noria, args: list[str], message: str) -> None:
    assert message in noria("bench", "serve", *args).error()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_is_full_in_the_end(noria: Noria) -> None:
    with ScriptedServer() as server:
        outcome = noria("bench", "serve", "--base-url", server.url, *SMALL, "--plot", "/dev/full")
    assert outcome.status == 1
    assert "/dev/full cannot be written: No space left on device" in outcome.err


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, noria.cli.bench.serve, noria.bench.client, noria.bench.pictures\n"
        "heavy = {'jax', 'numpy', 'pydantic', 'fastapi', 'tokenizers', 'openai'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
