"""Plans with attention divided by request, on eight CPU devices in the place of the chips."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("eight_devices_worker.py")
MODELS = Path(__file__).parents[1] / "golden" / "models"
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks_override": 17}
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def planned(model: str, search: bool = False, **engines: dict[str, int]) -> dict[str, Any]:
    job = {"model": model, "topology": "v6e:2x4", "options": SIZES, "engines": engines, "search": search}
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(job)],
        env={**os.environ, **EIGHT_DEVICES},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_exchanges(found: dict[str, Any]) -> None:
    """They are those that a search expects, and the ids of tokens where they are divided."""
    assert found["forward"]["error"] is None
    assert found["expected_sent"] <= found["forward"]["sent"] < 1.01 * found["expected_sent"]


def test_llama() -> None:
    """Of two KV heads, which tensor parallelism over more devices copies."""
    parts, whole = {"attention_data_parallel_size": 2, "tensor_parallel_size": 4}, {"tensor_parallel_size": 4}
    found = planned(str(MODELS / "llama"), search=True, parts=parts, whole=whole)
    parts, whole = found["parts"], found["whole"]
    check_exchanges(parts)
    check_exchanges(whole)
    # The pool is that of a rank; requests and tokens are those of both.
    assert (parts["memory"]["num_blocks"], whole["memory"]["num_blocks"]) == (17, 17)
    assert parts["memory"]["block_bytes"] == whole["memory"]["block_bytes"]
    assert parts["memory"]["max_concurrency"] == 2 * whole["memory"]["max_concurrency"]
    assert parts["memory"]["weights"] < whole["memory"]["weights"]
    assert (whole["rows"], parts["rows"], parts["prefill"]["tokens"]) == (7, 8, 64)
    tried = found["search"]["meshes"]
    meshes = [(each["tensor_parallel_size"], each["attention_data_parallel_size"]) for each in tried]
    assert meshes == [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)]
    by_mesh = dict(zip(meshes, tried))
    assert [each["copies"] for each in tried] == [8, 4, 2, 2, 2, 1, 1, 1]
    assert not [each["reason"] for each in tried if each["reason"]]
    assert by_mesh[4, 2]["decode"] == parts["decode"]
    assert by_mesh[4, 2]["cache_tokens"] == 2 * by_mesh[4, 1]["cache_tokens"]
    most = max(each["tokens_per_s"] for each in tried)
    close = [mesh for mesh, each in by_mesh.items() if each["tokens_per_s"] >= 0.98 * most]
    assert tuple(found["best"]) == min(close, key=lambda mesh: by_mesh[mesh]["decode"]["seconds"])


@pytest.mark.slow
def test_latent_attention_and_experts() -> None:
    """There is one KV head, which every device has that shares heads."""
    copied = {"expert_parallel_size": 2, "tensor_parallel_size": 2}
    parts = {"attention_data_parallel_size": 2, "expert_parallel_size": 2}
    found = planned(str(MODELS / "deepseek-v3"), parts=parts, copied=copied)
    one, other = found["parts"], found["copied"]
    check_exchanges(other)
    # For TPUs XLA gathers the residual stream and its norm, for CPUs one of them, in each of two layers with experts.
    check_exchanges(one | {"expected_sent": one["expected_sent"] - 2 * one["forward"]["bucket"] * 32 * 4 / 2})
    assert one["memory"]["cache"] == other["memory"]["cache"]
    assert one["memory"]["max_concurrency"] == 2 * other["memory"]["max_concurrency"]


def test_what_would_make_it_fit() -> None:
    """Attention is not divided among the parts: that is for more devices in each."""
    uneven = {"attention_data_parallel_size": 3, "max_num_seqs": 6}
    found = planned("deepseek-v3", parts={"attention_data_parallel_size": 8}, uneven=uneven)
    assert re.fullmatch(
        r"it does not fit v6e:2x4: weights take 17\d\.\d of 28\.1 GiB a device; use tensor_parallel_size 8",
        found["parts"]["refused"],
    )
    assert "so 3 must divide the model's number of experts (256)" in found["uneven"]["refused"]
