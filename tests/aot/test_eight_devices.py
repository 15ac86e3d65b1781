"""Plans with attention divided by request, compiled for eight CPU devices in the place of the chips."""

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
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks_override": 9}
PARTS = {"attention_data_parallel_size": 2, "tensor_parallel_size": 4}
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def planned(model: str, search: bool = False, **plans: dict[str, int]) -> dict[str, Any]:
    job = {"model": model, "topology": "v6e:2x4", "options": SIZES, "plans": plans, "search": search}
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


def test_llama() -> None:
    found = planned(str(MODELS / "llama"), search=True, parts=PARTS, whole={"tensor_parallel_size": 4})
    parts, whole = found["parts"], found["whole"]
    assert not [each["error"] for each in parts["programs"] if each["error"]]
    for each in parts["programs"]:
        if each["name"] == "forward":
            assert each["sent"] == pytest.approx(parts["expected_sent"][str(each["bucket"])], rel=0.02)
    # The pool is that of a rank. Requests and tokens are those of both.
    assert (parts["memory"]["num_blocks"], parts["cache_tokens"]) == (9, 2 * whole["cache_tokens"])
    assert parts["memory"]["block_bytes"] == whole["memory"]["block_bytes"]
    assert parts["memory"]["weights"] < whole["memory"]["weights"]
    assert (parts["decode"]["rows"], parts["prefill"]["tokens"]) == (8, 64)
    # Two KV heads: with more devices that only share heads each would be copied.
    tried = found["search"]["meshes"]
    meshes = [(each["tensor_parallel_size"], each["attention_data_parallel_size"]) for each in tried]
    assert meshes == [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)]
    by_mesh = dict(zip(meshes, tried))
    assert [by_mesh[mesh]["copies"] for mesh in meshes] == [8, 4, 2, 2, 2, 1, 1, 1]
    assert by_mesh[4, 2]["decode"]["seconds"] == pytest.approx(parts["decode"]["seconds"], rel=0.01)
    assert by_mesh[4, 2]["cache_tokens"] == parts["cache_tokens"]
    best = max(meshes, key=lambda mesh: by_mesh[mesh]["tokens_per_s"])
    assert by_mesh[tuple(found["best"])]["tokens_per_s"] == pytest.approx(by_mesh[best]["tokens_per_s"], rel=0.02)


def test_latent_attention_and_experts() -> None:
    """Every KV head is one: tensor parallelism alone copies the cache for each device."""
    copied = {"expert_parallel_size": 2, "tensor_parallel_size": 2}
    parts = {"attention_data_parallel_size": 2, "expert_parallel_size": 2}
    found = planned(str(MODELS / "deepseek-v3"), parts=parts, copied=copied)
    one, other = found["parts"], found["copied"]
    assert not [each["error"] for each in one["programs"] if each["error"]]
    assert one["cache_tokens"] == 2 * other["cache_tokens"]
    assert one["memory"]["cache"] == other["memory"]["cache"]
    for each in one["programs"]:
        if each["name"] == "forward":
            assert each["sent"] == pytest.approx(one["expected_sent"][str(each["bucket"])], rel=0.02)


def test_what_would_make_it_fit() -> None:
    """Attention is not divided among the parts: that is for more devices in each."""
    uneven = {"attention_data_parallel_size": 3, "max_num_seqs": 6}
    found = planned("deepseek-v3", parts={"attention_data_parallel_size": 8}, uneven=uneven)
    assert re.fullmatch(
        r"it does not fit v6e:2x4: weights take 17\d\.\d of 28\.1 GiB a device; use tensor_parallel_size 8",
        found["parts"]["refused"],
    )
    assert "so 3 must divide the model's number of experts (256)" in found["uneven"]["refused"]
