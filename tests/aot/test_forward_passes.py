"""What the compiler makes of forward passes for real chips: bytes they move, copies, and what is exchanged."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from noria.aot import devices
from noria.aot.models import load_config

pytestmark = [
    pytest.mark.skipif(not devices.is_available(), reason="libtpu is not installed"),
    pytest.mark.slow,
]
WORKER = Path(__file__).with_name("forward_worker.py")
LAYERS = 8  # all are one loop, so more are the same program; with two, some weights of all layers fit the fast memory
UNAVOIDABLE = 1.15


def compiled(model: str, folder: Path, topology: str, buckets: list[int], **options: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_blocks_override": 16385}
    job = {
        "model": {**load_config(model), "num_hidden_layers": LAYERS},
        "topology": topology,
        "options": sizes | options,
        "buckets": buckets,
        "dump": str(folder),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(job)], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check_text(told: dict[str, Any], folder: Path, bucket: int, *gathered: str) -> None:
    """Nothing is gathered but arrays of these shapes, no weights, and whatever has the shape of the cache is the cache:
    passed on or updated in place."""
    assert told["programs"][str(bucket)]["error"] is None
    text = (folder / f"forward-{bucket}.txt").read_text()
    gathers = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) all-gather(?:-start|-done)?\(", text, re.MULTILINE)
    assert {shape.partition("{")[0] for shape in gathers} == set(gathered)
    assert "all-to-all" not in text
    shape = ",".join(map(str, told["cache_shape"]))
    made = re.findall(rf"^\s+(?:ROOT )?%?([\w.\-]+) = \w+\[{re.escape(shape)}\]\S* ([\w\-]+)\(", text, re.MULTILINE)
    assert made
    assert not [name for name, kind in made if kind.startswith(("copy", "transpose", "convert")) or "copy" in name]
    assert told["programs"][str(bucket)]["largest_copy"] < told["cache"] / 10
    assert told["programs"][str(bucket)]["temporary"] < told["cache"]


def test_bytes_of_llama_8b_on_one_chip(tmp_path: Path) -> None:
    told = compiled("llama-3.1-8b", tmp_path, "v6e:1x1", [64, 2048])
    matrices = 2 * LAYERS * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    for tokens in (64, 2048):
        check_text(told, tmp_path, tokens)
    # What the attention kernel declares: 64 requests at the longest, 4,096 tokens of 8 KV heads.
    cache = LAYERS * 64 * 4096 * 2 * 8 * 128 * 2
    # Written and read between the products: the residual stream, normalized inputs, queries, keys, values, attention's
    # output, and gate, up and their product in the MLP. Of longer steps most of it stays in fast memory.
    wide = 2 * 4096 * 4 + 4 * 4096 * 2 + 2 * 6144 * 2 + 2 * 4096 * 2 + 6 * 14336 * 2
    for tokens in (64, 2048):
        assert matrices + cache < told["programs"][str(tokens)]["bytes"]
        assert told["programs"][str(tokens)]["bytes"] < UNAVOIDABLE * (matrices + cache + LAYERS * tokens * wide)
    # Of the MLP what lies outside of it is gate, and the product, in bfloat16. S(1) is fast memory.
    text = (tmp_path / "forward-2048.txt").read_text()
    inner = re.findall(r"^\s+%?\S+ = (\w+)\[2048,14336\]\{[^}]*\} fusion\(", text, re.MULTILINE)
    assert inner
    assert set(inner) == {"bf16"}


def test_llama_70b_on_eight_chips(tmp_path: Path) -> None:
    told = compiled("llama-3.1-70b", tmp_path, "v6e:2x4", [64, 2048], tensor_parallel_size=8)
    for tokens in (64, 2048):
        check_text(told, tmp_path, tokens)
        program = told["programs"][str(tokens)]
        assert program["sent"] == pytest.approx(told["expected_sent"][str(tokens)], rel=0.02)
        sums = [each for each in program["exchanges"] if each["times"] == LAYERS]
        assert sum(each["bytes"] for each in sums) == 2 * tokens * 8192 * 4
    assert math.prod(told["cache_shape"]) * 4 == told["cache"]  # in words of 32 bits


def test_llama_70b_with_attention_divided_by_request(tmp_path: Path) -> None:
    """Each device has two KV heads for half of the requests, and an eighth of everything else."""
    layout = {"attention_data_parallel_size": 2, "tensor_parallel_size": 4}
    told = compiled("llama-3.1-70b", tmp_path, "v6e:2x4", [64, 2048], **layout)
    attention = LAYERS * (2 * 8192 * 8192 + 2 * 8192 * 1024) / 4
    others = LAYERS * 3 * 8192 * 28672 / 8
    for tokens in (64, 2048):
        check_text(told, tmp_path, tokens, f"bf16[{tokens},8192]", "bf16[64,8192]")  # the second to sample from
        program = told["programs"][str(tokens)]
        assert program["sent"] == pytest.approx(told["expected_sent"][str(tokens)], rel=0.001)
        least = 2 * (attention * tokens / 2 + others * tokens)
        assert least < program["flops"] < 1.1 * least  # beside it is attention between tokens


def test_experts_with_attention_divided_by_request(tmp_path: Path) -> None:
    """Experts lie on the devices along both axes. In each layer the residual stream is gathered, and its norm."""
    layout = {"attention_data_parallel_size": 2, "expert_parallel_size": 4}
    told = compiled("qwen3-30b-a3b", tmp_path, "v6e:2x4", [64], **layout)
    check_text(told, tmp_path, 64, "bf16[64,2048]")
    program = told["programs"]["64"]
    assert program["sent"] == pytest.approx(told["expected_sent"]["64"], rel=0.001)
    gathered = [each for each in program["exchanges"] if each["times"] == LAYERS and each["kind"] == "all-gather"]
    assert [(each["bytes"], each["devices"]) for each in gathered] == [(64 * 2048 * 2, 2)] * 2
