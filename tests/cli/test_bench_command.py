"""noria bench on a tiny model: what it prints, how it refuses, and the workloads themselves."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome

from noria.cli.bench import KINDS, machine, offline, step, workloads
from noria.cli.bench.machine import Limits
from noria.errors import NoriaError

Noria = Callable[..., Outcome]
LIMITS = Limits("Wheel 9000", 2, ("avx2",), read_gb_s=20.0, gflop_s=100.0)
SIZES = {
    "prefill": (1, 512, 1),
    "single": (1, 8, 65),
    "batch16": (16, 16 * 128, 16 * 64),
    "batch64": (64, 64 * 128, 64 * 64),
    "shared32": (32, 32 * 544, 32 * 32),
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder in which the limits of this machine are known already, so that no test has to measure."""
    monkeypatch.setenv("NORIA_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_xla_product", lambda: lambda a, b: a @ b)
    machine._write(tmp_path / "machine.json", {machine.processor().key: LIMITS})
    return tmp_path


@pytest.fixture
def run_lines(noria: Noria) -> Callable[..., list[dict[str, Any]]]:
    def run(*args: str) -> list[dict[str, Any]]:
        outcome = noria("bench", *args, "--json")
        assert outcome.status == 0, outcome.err
        return [json.loads(line) for line in outcome.out.splitlines()]

    return run


def test_workloads_are_those_of_the_definition(noria: Noria) -> None:
    printed = json.loads(noria("bench", "workloads").out)
    assert list(printed) == ["prefill", "single", "batch16", "batch64", "mixed64", "shared32"]
    for name, (requests, given, out) in SIZES.items():
        assert len(printed[name]) == requests
        assert sum(len(ids) for ids, _ in printed[name]) == given
        assert sum(count for _, count in printed[name]) == out
    assert len(printed["mixed64"]) == 64
    assert {16 <= len(ids) <= 256 and 16 <= count <= 256 for ids, count in printed["mixed64"]} == {True}
    prefixes = Counter(tuple(ids[:512]) for ids, _ in printed["shared32"])
    assert list(prefixes.values()) == [32]
    every = [token for requests in printed.values() for ids, _ in requests for token in ids]
    assert min(every) >= 1000
    assert max(every) < 30000
    # The draws of Python's generator with seed 0: the first of the shared prefix, and the first prompt after it.
    assert printed["shared32"][0][0][:4] == [28670, 13623, 25836, 14781]
    assert printed["prefill"][0][0][:4] == [19377, 16767, 16532, 12045]
    some = json.loads(noria("bench", "workloads", "--workload", "single", "--workload", "prefill").out)
    assert some == {name: printed[name] for name in ("prefill", "single")}


def test_a_smaller_vocabulary_folds_the_ids() -> None:
    [single] = workloads.chosen(["single"])
    assert single.fold(30000) == single
    assert single.fold(7).requests[0][0] == [token % 7 for token in single.requests[0][0]]
    assert single.fold(7).requests[0][1] == 65


def test_machine_measures_once_and_keeps_it(noria: Noria, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda cores: 31.004e9)
    monkeypatch.setattr(machine, "product_rate", lambda multiply: 77.04e9)
    known = noria("bench", "machine", "--json")
    assert json.loads(known.out)["read_gb_s"] == 20.0
    assert known.err == ""
    measured = noria("bench", "machine", "--json", "--remeasure")
    assert json.loads(measured.out)["read_gb_s"] == 31.0
    assert json.loads(measured.out)["gflop_s"] == 77.0
    assert {"python", "jax", "noria", "native", "processor", "cores"} <= set(json.loads(measured.out))
    shown = noria("bench", "machine")
    assert "31.0 GB/s" in shown.out
    assert "77 GFLOP/s" in shown.out
    (home / "machine.json").write_text("{broken")
    assert json.loads(noria("bench", "machine", "--json").out)["read_gb_s"] == 31.0


def test_limits_are_measured_apart_from_an_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.limits_measured_apart() == LIMITS
    (home / "machine.json").unlink()
    commands: list[list[str]] = []
    results = [subprocess.CompletedProcess([], 0, json.dumps(dataclasses.asdict(LIMITS) | {"jax": "1"}), "measuring")]

    def run(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess:
        commands.append(command)
        assert env["JAX_PLATFORMS"] == "cpu"  # the device is the engine's
        return results.pop()

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.limits_measured_apart() == LIMITS
    assert [command[1:] for command in commands] == [["-m", "noria", "bench", "machine", "--json"]]
    results.append(subprocess.CompletedProcess([], 1, "", "measuring\nnoria: error: no room\n"))
    with pytest.raises(NoriaError, match="noria bench machine ended with status 1: noria: error: no room"):
        machine.limits_measured_apart()
    results.append(subprocess.CompletedProcess([], -9, "", ""))
    with pytest.raises(NoriaError, match="ended with status -9: it said nothing"):
        machine.limits_measured_apart()


def test_a_cache_folder_that_cannot_be_written(noria: Noria, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda cores: 31.004e9)
    monkeypatch.setattr(machine, "product_rate", lambda multiply: 77.04e9)
    monkeypatch.setenv("NORIA_HOME", str(home / "machine.json"))  # which is a file
    measured = noria("bench", "machine", "--json")
    assert json.loads(measured.out)["gflop_s"] == 77.0
    assert "the figures are not kept" in measured.err


def test_offline(run_lines: Callable[..., list[dict[str, Any]]], plain_model: str, small: list[str]) -> None:
    startup, limits, single = run_lines("offline", plain_model, "--workload", "single", "--repetitions", "2", *small)
    assert startup["workload"] == "startup"
    assert startup["programs"] >= startup["compiled"] >= 0
    assert 0 < startup["load_s"] < startup["time_to_first_token_s"]
    assert limits["read_gb_s"] == 20.0
    assert (single["in"], single["out"], single["steps"]) == (8, 65, 65)
    assert 0 < single["best_s"] <= single["median_s"]
    assert single["out_tok_s"] == pytest.approx(65 / single["median_s"], rel=0.01)
    assert single["total_tok_s"] == pytest.approx(73 / single["median_s"], rel=0.01)
    assert 0 <= single["host_share"] <= 1
    assert single["peak_mib"] > 50
    assert len(single["sample"]) == 16
    # The golden model: its layers are read in each of 65 passes, the head too, and the cache grows from 8 to 72 tokens.
    config = json.loads((Path(plain_model) / "config.json").read_text())
    hidden, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    matrices = layers * hidden * (2 * config["num_attention_heads"] * config["head_dim"] + 2 * kv + 3 * mlp)
    weights = 4 * (matrices + (2 * layers + 1) * hidden + config["vocab_size"] * hidden)
    cache = layers * 2 * kv * 4 * sum(range(8, 73))
    expected = (65 * weights + cache) / single["median_s"] / 1e9
    assert single["gb_s"] == pytest.approx(expected, abs=0.006 + 0.01 * expected)


def test_offline_as_a_table_and_a_prefix_cache_that_starts_empty(
    noria: Noria, plain_model: str, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [5] * 40
    made = (workloads.Workload("shared32", tuple(([*shared, 6 + index], 3) for index in range(3))),)
    monkeypatch.setattr(offline, "chosen", lambda names: made)
    sizes = ["--max-model-len", "96", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    args = [*sizes, "--dtype", "float32", "--compile-cache-dir", compile_cache_dir, "--repetitions", "1"]
    outcome = noria("bench", "offline", plain_model, *args)
    assert outcome.status == 0, outcome.err
    heading, row = outcome.out.splitlines()
    assert heading.split()[:3] == ["workload", "in", "out"]
    assert row.split()[:3] == ["shared32", "123", "9"]
    assert "programs ready" in outcome.err
    assert "limits 20.0 GB/s" in outcome.err
    [*_, result] = [
        json.loads(line) for line in noria("bench", "offline", plain_model, *args, "--json").out.splitlines()
    ]
    # Two run at a time: of the first two one may find what the other computed, of a repetition before nobody anything.
    assert result["cached_tokens"] in (32, 64)


def test_latency(
    run_lines: Callable[..., list[dict[str, Any]]], noria: Noria, plain_model: str, small: list[str]
) -> None:
    args = ("latency", plain_model, "--input-len", "5", "--output-len", "4", "--batch-size", "3")
    args = (*args, "--num-iters", "2", "--num-iters-warmup", "1", *small)
    [found] = run_lines(*args)
    assert (found["input_len"], found["output_len"], found["batch_size"], found["num_iters"]) == (5, 4, 3, 2)
    for name in ("batch_ms", "ttft_ms", "itl_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["ttft_ms"]["mean"] < found["batch_ms"]["mean"]
    # The batch is its first token and three intervals after that.
    assert found["ttft_ms"]["mean"] + 3 * found["itl_ms"]["mean"] == pytest.approx(found["batch_ms"]["mean"], rel=0.25)
    table = noria("bench", *args).out.splitlines()
    assert [line.split("  ")[0] for line in table] == ["milliseconds", "batch", "first token", "between tokens"]
    [alone] = run_lines("latency", plain_model, "--input-len", "5", "--output-len", "1", "--num-iters", "1", *small)
    assert alone["itl_ms"]["mean"] is None


def test_step_times_every_program(
    run_lines: Callable[..., list[dict[str, Any]]],
    noria: Noria,
    plain_model: str,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_SECONDS", 0.0)
    _, *lines = run_lines("step", plain_model, "--context", "20", *small)
    programs = {(line["program"].split(",")[0], line["bucket"]) for line in lines}
    assert programs == {("forward", 16), ("forward", 32), ("sample", 8)}
    assert [(line["rows"], line["tokens"]) for line in lines if line["program"] == "forward, decode"] == [
        (1, 1),
        (8, 8),
    ]
    assert all(line["ms"] > 0 and line["mb"] > 0 and line["gflop"] >= 0 for line in lines)
    assert all(line["gb_s"] == pytest.approx(line["mb"] / line["ms"], rel=0.05, abs=0.02) for line in lines)
    shown = noria("bench", "step", plain_model, "--context", "20", *small)
    assert len(shown.out.splitlines()) == 1 + len(lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["offlin"], "noria bench has no offlin; did you mean offline?"),
        (["everything"], f"noria bench has no everything; there are {', '.join(KINDS)}"),
        (["offline"], "MODEL is missing"),
        (["offline", "m", "--workload", "singel"], "--workload: expected one of 'prefill', 'single'"),
        (["offline", "m", "--repetitions", "0"], "--repetitions must be at least 1, not 0"),
        (
            ["offline", "m", "--workload", "single", "--max-model-len", "72"],
            "requests of 73 tokens, but max_model_len is 72",
        ),
        (["offline", "no-such-model"], "no model 'no-such-model'"),
        (["latency", "m", "--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["latency", "m", "--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0, not -1"),
        (
            ["latency", "m", "--input-len", "2000", "--output-len", "49"],
            "requests of 2049 tokens, but max_model_len is 2048",
        ),
        (
            ["step", "m", "--context", "2048"],
            "--context must be at least 1 and less than max_model_len (2048), not 2048",
        ),
        (
            ["step", "m", "--context", "2041", "--num-scheduler-steps", "8"],
            "--context (2041) and the tokens of a burst (--num-scheduler-steps 8) exceed max_model_len (2048)",
        ),
        (["machine", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["workloads", "--workload", "x"], "--workload: expected one of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(noria: Noria, args: list[str], message: str) -> None:
    outcome = noria("bench", *args)
    assert message in outcome.error()
    assert "compiling" not in outcome.err


def test_help_of_every_kind(noria: Noria) -> None:
    shown = noria("bench", "--help")
    assert shown.status == 0
    assert all(name in shown.out for name in KINDS)
    for name in KINDS:
        outcome = noria("bench", name, "--help")
        assert outcome.status == 0
        assert f"usage: noria bench {name}" in outcome.out
