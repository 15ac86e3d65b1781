"""Several devices answer like one: whole engines in a process that has eight CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
WORKER = Path(__file__).with_name("shards_worker.py")
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def on_eight_devices(worker: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What the worker prints, in a process of its own: a process has as many devices as it begins with."""
    done = subprocess.run(
        [sys.executable, str(worker), json.dumps(job)],
        env={**os.environ, **EIGHT_DEVICES},
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(
    model: Path, engines: dict[str, dict[str, Any]], cache: str, speaks: bool = False, few: bool = False
) -> dict[str, Any]:
    job = {"model": str(model), "engines": engines, "speaks": speaks, "few": few, "compile_cache_dir": cache}
    return on_eight_devices(WORKER, job)


def flat(told: dict[str, Any]) -> list[Any]:
    """All log-probabilities of an answer."""
    return [entry for places in (*told["logprobs"], told["prompt_logprobs"]) for place in places for entry in place]


def check_equal(found: dict[str, Any]) -> None:
    """Tokens are the same; log-probabilities differ by what another order of sums makes, and with them, now and then,
    the ranks of two tokens that are neighbours."""
    alone, *others = found.values()
    ranks = []
    for run_index, expected in enumerate(alone):
        if run_index in (1, 2):  # who asks for log-probabilities of the prompt looks nothing up
            assert sum(answer["cached"] >= 8 for answer in expected) >= len(expected) - 1
        for other in others:
            for answer, same in zip(other[run_index], expected, strict=True):
                assert answer["token_ids"] == same["token_ids"]
                assert answer["cached"] == same["cached"]
                for (token, logprob, rank), (token2, logprob2, rank2) in zip(flat(answer), flat(same), strict=True):
                    assert token == token2
                    assert logprob == pytest.approx(logprob2, abs=2e-4)
                    ranks.append(abs(rank - rank2))
    assert ranks
    assert max(ranks) <= 1
    assert sum(ranks) <= len(ranks) / 100


@pytest.mark.parametrize(
    "several",
    [
        pytest.param({"tensor_parallel_size": 2, "device_order": [5, 2]}, marks=pytest.mark.slow),
        {"tensor_parallel_size": 4, "device_order": [5, 2, 0, 7]},
    ],
    ids=["two", "four"],
)
def test_several_devices_answer_like_one(
    several: dict[str, Any], tiny_text_model: Path, compile_cache_dir: str
) -> None:
    """Four query heads and two KV heads: four devices have two copies of each. The order of devices is theirs."""
    found = run(tiny_text_model, {"one": {}, "several": several}, compile_cache_dir, speaks=True)
    check_equal(found)
    assert any(answer["logprobs"][0] for answer in found["several"][0])
    assert any(answer["prompt_logprobs"] for answer in found["several"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama-bias-linear-rope", (2, 4)),  # biases everywhere; a vocabulary of 197 that is not split
        ("mistral-window", (2, 4)),
        ("qwen2", (2, 4)),
        ("qwen2-untied-window", (4,)),
        ("qwen3", (2, 4)),
        ("gemma3", (2,)),  # two heads
    ],
)
def test_families(family: str, sizes: tuple[int, ...], compile_cache_dir: str) -> None:
    engines: dict[str, dict[str, Any]] = {"one": {}} | {str(n): {"tensor_parallel_size": n} for n in sizes}
    check_equal(run(GOLDEN / family, engines, compile_cache_dir))


@pytest.mark.slow
def test_experts_on_several_devices(compile_cache_dir: str) -> None:
    """Half of the experts on two each, which share them inside."""
    both = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "device_order": [3, 6, 0, 5]}
    engines: dict[str, dict[str, Any]] = {"one": {}, "both": both}
    check_equal(run(GOLDEN / "qwen3-moe-dense-first", engines, compile_cache_dir))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v2"])
def test_families_with_experts(family: str, compile_cache_dir: str) -> None:
    engines: dict[str, dict[str, Any]] = {
        "one": {},
        "apart": {"expert_parallel_size": 4},
        "inside": {"tensor_parallel_size": 4},
        "both": {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    }
    check_equal(run(GOLDEN / family, engines, compile_cache_dir))


@pytest.mark.slow
def test_int8_weights(compile_cache_dir: str) -> None:
    options = {"quantization": "int8"}
    engines: dict[str, dict[str, Any]] = {"one": options, "four": {**options, "tensor_parallel_size": 4}}
    check_equal(run(GOLDEN / "llama", engines, compile_cache_dir))
    engines = {"one": options, "experts": {**options, "expert_parallel_size": 2, "tensor_parallel_size": 2}}
    check_equal(run(GOLDEN / "mixtral", engines, compile_cache_dir))
