"""Whole plans: compiled for TPUs on this machine. All but the refusals need libtpu, as the extra `aot` has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from noria.aot import devices
from noria.aot.models import load_config
from noria.aot.plan import make_plan
from noria.aot.setup import sizes_for
from noria.aot.topologies import parse_topology
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.runner.stored import DRAFT_FOLDER, StoredPrograms

needs_libtpu = pytest.mark.skipif(not devices.is_available(), reason="libtpu is not installed")
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--max-model-len", "256")
TINY: dict[str, Any] = {  # sizes that fill a TPU's tiles; 4 query heads, 2 KV heads
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def run(*args: str) -> dict[str, Any]:
    """In a process of its own: libtpu reads the environment once."""
    command = [sys.executable, "-m", "noria", "plan", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_libtpu
def test_a_model_on_four_chips(tiny: str) -> None:
    plan = run(tiny, "--topology", "v6e:2x2", *SMALL)
    assert plan["tensor_parallel_size"] == 4
    assert [each["error"] for each in plan["programs"]] == [None] * 7
    (forward,) = [each for each in plan["programs"] if each["name"] == "forward"]
    tokens, layers, width = 16, TINY["num_hidden_layers"], TINY["hidden_size"]
    sums = [each for each in forward["exchanges"] if each["kind"] == "all-reduce" and each["times"] == layers]
    # Of attention and MLP, in float32; nothing else is exchanged in a layer.
    assert sum(each["bytes"] for each in sums) == 2 * tokens * width * 4
    assert all(each["kind"] == "all-reduce" for each in forward["exchanges"])
    assert forward["bytes"] < plan["memory"]["cache"] / 1000  # no copy of the cache is made
    (sample,) = [each for each in plan["programs"] if each["name"] == "sample"]
    rows, vocabulary = 8, TINY["vocab_size"]
    assert all(each["bytes"] < rows * vocabulary * 4 for each in sample["exchanges"])  # logits stay where they are
    # One of four query heads and a copy of a KV head are on each device.
    assert plan["memory"]["block_bytes"] == 16 * layers * 2 * 128 * 2
    blocks = plan["memory"]["num_blocks"] - 1
    assert plan["cache_tokens"] == blocks * 16
    assert plan["memory"]["available"] == int(0.9 * int(31.25 * 2**30))
    assert plan["decode"]["rows"] == 8
    assert plan["decode"]["seconds"] > 0


@needs_libtpu
@pytest.mark.slow
def test_attention_divided_by_request(tiny: str) -> None:
    """Two parts of two devices, each of which has a KV head for half of the requests."""
    sizes = ("--max-num-seqs", "16", "--max-num-batched-tokens", "16", "--max-model-len", "256")
    plan = run(tiny, "--topology", "v6e:2x2", "--attention-data-parallel-size", "2", *sizes)
    assert (plan["attention_data_parallel_size"], plan["tensor_parallel_size"]) == (2, 2)
    assert not [each["error"] for each in plan["programs"] if each["error"]]
    (forward,) = [each for each in plan["programs"] if each["name"] == "forward"]
    layers, stream = TINY["num_hidden_layers"], 16 * TINY["hidden_size"]
    in_layers = [
        (each["kind"], each["bytes"], each["devices"]) for each in forward["exchanges"] if each["times"] == layers
    ]
    # The sum over the heads of a part, the gather of the parts, and the sum behind the MLP over all devices.
    sums = ("all-reduce", 4 * stream // 2, 2), ("all-reduce", 4 * stream, 4)
    assert sorted(in_layers) == [("all-gather", 2 * stream, 2), *sums]
    assert forward["bytes"] < plan["memory"]["cache"] / 1000  # no copy of the cache is made
    for each in plan["programs"]:
        if each["name"].startswith("sample"):  # logits stay where they are
            assert all(one["bytes"] < 16 * TINY["vocab_size"] for one in each["exchanges"])
    assert plan["memory"]["block_bytes"] == 16 * layers * 2 * 128 * 2
    assert plan["cache_tokens"] == 2 * (plan["memory"]["num_blocks"] - 1) * 16
    assert (plan["decode"]["rows"], plan["prefill"]["tokens"]) == (16, 16)


@needs_libtpu
@pytest.mark.slow
def test_two_shapes(tiny: str) -> None:
    plan = run(tiny, "--topology", "v6e:1x1", *SMALL, "--most-model-len", "64")
    assert [each["error"] for each in plan["programs"]] == [None] * 9
    assert {"forward", "forward long", "merge"} <= {each["name"] for each in plan["programs"]}
    assert (plan["decode"]["context"], plan["decode"]["rows"]) == (32, 8)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:4x4", "v5p:2x2x1", "tpu7x:2x2x1", "v6e:8x8"])
def test_every_kind_of_chip(tiny: str, topology: str) -> None:
    plan = run(tiny, "--topology", topology, *SMALL)
    assert plan["tensor_parallel_size"] == (1 if topology == "v6e:1x1" else 4)


@needs_libtpu
@pytest.mark.slow
def test_forward_passes_of_two_slices_exchange_nothing_more(tiny: str) -> None:
    one = run(tiny, "--topology", "v6e:2x2", *SMALL)
    twice = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "256")
    two = run(tiny, "--topology", "v6e:2x2", "--num-slices", "2", *twice)
    assert (two["slices"], two["data_parallel_size"], two["tensor_parallel_size"]) == (2, 2, 4)
    assert not [each["error"] for each in two["programs"] if each["error"] is not None]
    find = lambda plan, bucket: next(p for p in plan["programs"] if (p["name"], p["bucket"]) == ("forward", bucket))
    alone, forward = find(one, 16), find(two, 32)
    assert forward["exchanges"] == alone["exchanges"]
    assert two["cache_tokens"] == 2 * one["cache_tokens"]
    for key in ("weights", "activations", "block_bytes", "num_blocks"):
        assert two["memory"][key] == one["memory"][key]  # of a device
    for key in ("decode", "prefill"):
        times = two[key]["tokens_per_s"] / one[key]["tokens_per_s"]
        assert 1.98 < times < 2.5  # a rank has a smaller bucket, too


@needs_libtpu
@pytest.mark.slow
def test_search(tiny: str) -> None:
    sizes = ("--max-num-seqs", "8", "--max-num-batched-tokens", "300", "--max-model-len", "256")
    plan = run(tiny, "--topology", "v6e:2x2", "--search", *sizes)
    meshes = plan["search"]["meshes"]
    sizes_of = lambda each: (each["tensor_parallel_size"], each["attention_data_parallel_size"], each["copies"])
    assert list(map(sizes_of, meshes)) == [(1, 1, 4), (2, 1, 2), (4, 1, 1), (2, 2, 1), (1, 4, 1)]
    best = max(meshes, key=lambda each: each["tokens_per_s"])
    assert plan["tensor_parallel_size"] == best["tensor_parallel_size"] == 1  # so small that sharing does not pay
    assert {each["token_bucket_gap"] for each in plan["search"]["buckets"]} == {0, 128, 256}
    assert plan["decode"]["seconds"] == pytest.approx(best["decode"]["seconds"], rel=0.01)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [("--tensor-parallel-size", "4"), ("--tensor-parallel-size", "2", "--attention-data-parallel-size", "2")]
)
def test_compiling_into_a_folder(tiny: str, tmp_path: Path, mesh: tuple[str, ...]) -> None:
    out = tmp_path / "programs"
    args = (tiny, "--topology", "v6e:2x2", "--out", str(out), *mesh, *SMALL)
    done = subprocess.run(
        [sys.executable, "-m", "noria", "compile", *args], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("7 programs for v6e:2x2 in ")
    manifest = json.loads((out / "manifest.json").read_text())
    origin = manifest["origin"]
    assert (origin["kind of device"], origin["number of devices"], origin["platform"]) == ("TPU v6 lite", 4, "tpu")
    assert origin["libtpu"]
    assert sorted(path.stem for path in out.glob("*.bin")) == sorted(manifest["programs"])
    StoredPrograms.open(out).check(origin)
    with pytest.raises(ConfigError, match=r"its programs are for another libtpu: .* there, 0\.1 here; make them anew"):
        StoredPrograms.open(out).check({**origin, "libtpu": "0.1"})


HEAD: dict[str, Any] = {
    **TINY,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 1024,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "num_hidden_layers": 1,
}


def drafter(folder: Path, method: str, **changes: Any) -> tuple[str, ...]:
    """The option that names one of that kind."""
    folder.mkdir()
    config = (HEAD if method == "eagle3" else TINY | {"num_hidden_layers": 1}) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return "--speculative-config", json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": 3})


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_drafts(tiny: str, tmp_path: Path, method: str) -> None:
    """It is planned for and compiled beside the model, whose memory it shares."""
    options = (tiny, "--topology", "v6e:2x2", *SMALL, *drafter(tmp_path / "drafts", method))
    plan = run(*options)
    programs, draft = [each["name"] for each in plan["programs"]], plan["draft"]
    assert all(each["error"] is None for each in plan["programs"])
    whole = int(0.9 * int(31.25 * 2**30))
    if method == "eagle3":
        assert draft is None
        assert {"forward", "sample", "follow", "draft"} <= set(programs)
        assert plan["memory"]["available"] == whole
        assert plan["memory"]["block_bytes"] == 16 * (TINY["num_hidden_layers"] + 1) * 2 * 128 * 2
    else:
        assert [each["error"] for each in draft["programs"]] == [None] * len(draft["programs"])
        assert {"forward", "sample", "decode"} <= {each["name"] for each in draft["programs"]}
        assert draft["tensor_parallel_size"] == 4
        assert draft["memory"]["cache"] == pytest.approx(whole / 10, rel=0.01)
        assert plan["memory"]["available"] == whole - draft["memory"]["weights"] - draft["memory"]["cache"]
    out = tmp_path / "programs"
    command = [sys.executable, "-m", "noria", "compile", *options, "--tensor-parallel-size", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    stored = StoredPrograms.open(out)
    assert {name.split("-")[0] for name in stored.digests} >= {"forward", "sample"}
    assert ("draft head" in stored.origin) == (method == "eagle3")
    assert stored.origin["speculative_config"]["method"] == method
    assert (out / DRAFT_FOLDER).exists() == (method == "draft_model")
    if method == "draft_model":
        assert StoredPrograms.open(out / DRAFT_FOLDER).num_blocks == draft["memory"]["num_blocks"]


@needs_libtpu
def test_a_draft_model_of_another_family(tiny: str, tmp_path: Path) -> None:
    options = drafter(tmp_path / "drafts", "draft_model", vocab_size=1024)
    command = [sys.executable, "-m", "noria", "plan", tiny, "--topology", "v6e:1x1", *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert re.search("the draft model .*: it has a vocabulary of 1024 tokens, which must be no larger", done.stderr)


@needs_libtpu
@pytest.mark.slow
def test_llama_70b_fits_eight_chips() -> None:
    """With the figures of a roofline by hand: 70.55 billion parameters, of which embedding and head are 1.05 each."""
    plan = run("llama-3.1-70b", "--topology", "v6e:2x4", "--max-model-len", "8192", "--context", "4000", *SMALL[:4])
    assert [each["error"] for each in plan["programs"]] == [None] * 7
    assert plan["memory"]["weights"] == pytest.approx(2 * 70.55e9 / 8, rel=0.01)
    token = 2 * 128 * 2 * 80  # of one KV head of a device, in all layers
    room = 0.9 * 31.25 * 2**30 - 2 * 70.55e9 / 8
    assert plan["cache_tokens"] == pytest.approx(room / token, rel=0.02)
    table = 128256 * 8192
    reads = (70.55e9 - table) * 2 / 8 + 8 * 4001 * token
    sums = 2 * 7 / 8 * (2 * 80 * 4 + 2) * 16 * 8192  # two of float32 a layer and one of embeddings, of 16 tokens
    by_hand = reads / 1638e9 + sums / 400e9
    assert plan["decode"]["seconds"] == pytest.approx(by_hand, rel=0.15)
    (forward,) = [each for each in plan["programs"] if each["name"] == "forward"]
    # Of the attention kernel it has what it declares: with more tokens than requests one prompt, which is short here.
    assert forward["bytes"] == pytest.approx((70.55e9 - 2 * table) * 2 / 8, rel=0.15)
    assert forward["flops"] == pytest.approx(2 * (70.55e9 - 2 * table) / 8 * 16, rel=0.15)
    assert forward["arguments"] == pytest.approx(plan["memory"]["weights"] + plan["memory"]["cache"], rel=0.1)


@needs_libtpu
@pytest.mark.slow
def test_a_decode_step_reads_little_more_than_it_must() -> None:
    """Llama 3.1 8B on one chip, 64 rows, of which the attention kernel declares the longest: 4096 tokens each."""
    sizes = ("--max-num-seqs", "64", "--max-num-batched-tokens", "64", "--max-model-len", "4096")
    plan = run("llama-3.1-8b", "--topology", "v6e:1x1", *sizes)
    (forward,) = [each for each in plan["programs"] if (each["name"], each["bucket"]) == ("forward", 64)]
    weights = 2 * (8.03e9 - 2 * 128256 * 4096)
    least = weights + 64 * 4096 * 2 * 8 * 128 * 2 * 32
    assert least < forward["bytes"] < 1.15 * least


@pytest.mark.parametrize(
    ("options", "topology", "message"),
    [
        ({"tensor_parallel_size": 16}, "v6e:2x4", r"tensor_parallel_size \(16\) exceeds the 8 devices of v6e:2x4"),
        (
            {"attention_data_parallel_size": 4, "tensor_parallel_size": 4},
            "v6e:2x4",
            r"attention_data_parallel_size \(4\) x tensor_parallel_size \(4\) exceeds the 8 devices of v6e:2x4",
        ),
        (
            {"attention_data_parallel_size": 4, "max_num_seqs": 6},
            "v6e:2x4",
            r"max_num_seqs \(6\) must be a multiple of .* use 8",
        ),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 8},
            "v6e:2x4",
            r"data_parallel_size \(2\) x tensor_parallel_size \(8\) exceeds the 8 devices of v6e:2x4",
        ),
        ({"kv_cache_dtype": "float16"}, "v6e:2x4", "kv_cache_dtype float16: a TPU does not compute in float16"),
        ({"max_model_len": 10**9}, "v6e:2x4", "max_model_len"),
        (
            {"speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 2}},
            "v6e:2x4",
            "speculative_config: the draft model d: d is neither a folder with config.json",
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "llama-3.1-8b", "num_speculative_tokens": 2}},
            "v6e:2x4",
            "speculative_config: the draft head llama-3.1-8b: ",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], topology: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(EngineConfig(model="m", **options), load_config("llama-3.1-8b"), parse_topology(topology))


def test_a_context_beyond_the_longest_request() -> None:
    config = EngineConfig(model="m", max_model_len=1024)
    with pytest.raises(ConfigError, match=r"context \(1024\) must be below max_model_len \(1024\)"):
        make_plan(config, load_config("llama-3.1-8b"), parse_topology("v6e:2x4"), context=1024)


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install noria\[aot\]"):
        make_plan(EngineConfig(model="m"), load_config("llama-3.1-8b"), parse_topology("v6e:1x1"))


@needs_libtpu
@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (("llama-3.1-70b", "--topology", "v6e:2x2"), "quantization int8"),
        (("llama-3.1-70b", "--topology", "v5e:2x2"), "tensor_parallel_size 16"),
        (
            ("llama-3.1-70b", "--topology", "v5e:2x2", "--tensor-parallel-size", "1", "--memory-utilization", "0.01"),
            "chips",
        ),
    ],
)
def test_a_model_that_does_not_fit(args: tuple[str, ...], remedy: str) -> None:
    command = [sys.executable, "-m", "noria", "plan", *args, "--max-model-len", "4096"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert re.search(
        rf"it does not fit {args[2]}: weights take [\d.]+ of [\d.]+ GiB a device; use {remedy}", done.stderr
    )


def test_as_many_devices_as_can_share_it() -> None:
    config = load_config("llama-3.1-8b")  # 32 heads
    assert sizes_for(config, parse_topology("v6e:2x4"), EngineConfig(model="m"))[-1] == 8
    assert sizes_for(config, parse_topology("v6e:8x8"), EngineConfig(model="m"))[-1] == 32
    assert (
        sizes_for(load_config("qwen2.5-7b"), parse_topology("v6e:2x4"), EngineConfig(model="m"))[-1] == 4
    )  # 28 heads, 4 KV heads
    experts = load_config("mixtral-8x7b")
    assert sizes_for(experts, parse_topology("v6e:2x4"), EngineConfig(model="m", expert_parallel_size=2)) == (1, 2, 4)
    assert sizes_for(experts, parse_topology("v6e:2x4"), EngineConfig(model="m", expert_parallel_size=16)) == ()
