"""From options to an engine: what is refused before anything compiles, the memory plan, the compile cache and guard."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.config import EngineConfig
from noria.engine.startup import compile_programs
from noria.errors import CompileError, ConfigError, EngineDeadError, NoriaError, WeightsError
from noria.ops import native
from noria.runner.capture import CaptureReport, Programs
from noria.runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# Forward, sampler, and for shaped requests: sampler, tables, their edits; for prompts: rows of hidden states, scores.
PROGRAMS = 7
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"max_modellen": 32}, "unknown option max_modellen; did you mean max_model_len"),
    "type": ({"max_model_len": "32"}, "max_model_len must be an integer"),
    "dtype": ({"dtype": "int4"}, "dtype must be one of auto, float32"),
    "kv_cache_dtype": ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of"),
    "device unknown": ({"device": "npu"}, "device must be one of"),
    "device absent": ({"device": "tpu"}, "device tpu: JAX finds no such device here; it has cpu"),
    "positions": ({"max_model_len": 257}, r"max_model_len \(257\) exceeds the 256 positions"),
    "budget": ({"max_num_batched_tokens": 7}, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
    "pool": ({"num_blocks_override": 8}, r"max_model_len \(64\) tokens needs 9 .*raise num_blocks_override"),
    "pool bytes": (
        {"num_blocks_override": None, "kv_cache_memory_bytes": 4096},
        "raise kv_cache_memory_bytes to",
    ),
    "memory": (
        {"num_blocks_override": None, "memory_utilization": 1e-9},
        "raise memory_utilization",
    ),
    "pool too large": ({"num_blocks_override": 2**30}, r"num_blocks_override \(1073741824\).*lower it"),
    "model": ({"model": "no-such-model"}, "no model 'no-such-model'"),
    "tokenizer": ({"tokenizer": "no-such-folder"}, "no-such-folder"),
    "backend": ({"attention_backend": "magic"}, "attention_backend must be one of"),
}


@pytest.fixture
def never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object) -> None:
        pytest.fail("the mistake was found only after compiling had begun")

    monkeypatch.setattr(ModelRunner, "capture_model", capture)


@pytest.mark.usefixtures("never_compiles")
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option(options: dict, name: str):
    wrong, message = BAD_OPTIONS[name]
    with pytest.raises(NoriaError, match=message) as caught:
        LLM(**options | wrong)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, WeightsError if name in ("model", "tokenizer") else ConfigError)


@pytest.fixture
def broken(tiny_text_model: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of the model with keys of its config changed, or files left out."""

    def make(config: dict | None = None, without: str | None = None) -> str:
        folder = tmp_path / "model"
        shutil.copytree(tiny_text_model, folder)
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | (config or {})))
        if without:
            (folder / without).unlink()
        return str(folder)

    return make


@pytest.mark.usefixtures("never_compiles")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"config": {"architectures": ["MambaForCausalLM"]}},
            "architecture MambaForCausalLM is not supported; supported",
        ),
        ({"config": {"architectures": None}}, "architecture .*none given"),
        ({"config": {"num_hidden_layers": 3}}, r"no tensor model\.layers\.2\."),
        ({"config": {"num_hidden_layers": 1}}, r"model\.layers\.1\."),
        ({"config": {"hidden_size": 64}}, r"tensor model\.embed_tokens\.weight has shape"),
        ({"without": "model.safetensors"}, "safetensors"),
        ({"without": "config.json"}, r"config\.json"),
        ({"without": "tokenizer.json"}, r"has no tokenizer\.json"),
    ],
    ids=lambda value: next(iter(map(str, next(iter(value.values())) if isinstance(value, dict) else [value]))),
)
def test_bad_model_folder(options: dict, broken: Callable[..., str], change: dict, message: str):
    with pytest.raises(WeightsError, match=message) as caught:
        LLM(**options | {"model": broken(**change)})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("never_compiles")
def test_truncated_weights(options: dict, broken: Callable[..., str]):
    model = broken()
    path = Path(model, "model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors.* truncated"):
        LLM(**options | {"model": model})


@pytest.mark.usefixtures("never_compiles")
def test_compile_cache_that_is_a_file(options: dict, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"compile_cache_dir .*choose another folder"):
        LLM(**options | {"compile_cache_dir": str(tmp_path / "file")})


def test_memory_plan(shared_llm: LLM):
    report = shared_llm.stats.startup
    plan = report.memory
    assert plan.num_blocks == 65
    assert plan.block_bytes == 2 * 8 * 2 * 2 * 16 * 4  # layers, tokens, KV heads, keys and values, head_dim, bytes
    assert plan.cache == plan.num_blocks * plan.block_bytes
    weights = shared_llm._front.engine.core.runner._weights
    import jax

    assert plan.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    cache = shared_llm._front.engine.core.runner._cache
    assert plan.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert plan.max_concurrency == 8.0
    assert report.programs == PROGRAMS
    assert "65 blocks, 8.0 requests of max_model_len" in str(report)


def test_the_pool_takes_what_memory_is_allowed(options: dict):
    allowed = 100 * 4096 + 17
    with LLM(**options | {"num_blocks_override": None, "kv_cache_memory_bytes": allowed}) as llm:
        assert llm.stats.startup.memory.num_blocks == 100
        assert llm.generate("the", GREEDY)[0].finished
        check_idle(llm)


_START = """
import json, sys
from noria import LLM, SamplingParams
options = json.loads(sys.argv[1])
with LLM(**options) as llm:
    [answer] = llm.generate("the", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    report = llm.stats.startup
    print(json.dumps([report.programs, report.compiled, llm.stats.compiles_after_warmup, answer.outputs[0].token_ids]))
"""


def test_second_start_compiles_nothing(options: dict, tmp_path: Path):
    """In another process, as a second start is."""
    fresh = options | {"compile_cache_dir": str(tmp_path / "programs")}
    with LLM(**fresh) as llm:
        report = llm.stats.startup
        assert report.compiled == report.programs == PROGRAMS
        [answer] = llm.generate("the", GREEDY)
    command = [sys.executable, "-c", _START, json.dumps(fresh)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [PROGRAMS, 0, 0, answer.outputs[0].token_ids]


def test_without_a_compile_cache(options: dict, shared_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Programs that are in a cache, to begin with; some of them will do."""
    original, kept = Programs.capture, ("tables", "edit", ("pick", 16))

    def capture(self: Programs, jobs: dict, *arguments: Any) -> CaptureReport:
        return original(self, {key: jobs[key] for key in kept}, *arguments)

    monkeypatch.setattr(Programs, "capture", capture)
    for folder, compiled in ((options["compile_cache_dir"], 0), ("", len(kept))):
        with LLM(**options | {"compile_cache_dir": folder}) as llm:
            assert (llm.stats.startup.programs, llm.stats.startup.compiled) == (len(kept), compiled)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up leaves out the programs of the smallest buckets."""
    original = Programs.capture

    def capture(self: Programs, jobs: dict, *arguments: Any) -> CaptureReport:
        kept = {key: job for key, job in jobs.items() if key not in (("forward", 16), ("sample", 8))}
        return original(self, kept, *arguments)

    monkeypatch.setattr(Programs, "capture", capture)


@pytest.mark.usefixtures("forgetful")
def test_strict_guard_raises_when_a_shape_was_not_captured(options: dict):
    with LLM(**options) as llm:
        with pytest.raises(CompileError, match=r"\('forward', 16\)"):
            llm.generate("the", GREEDY)
        assert llm.stats.compiles_after_warmup == 1
        with pytest.raises(EngineDeadError, match="CompileError"):
            llm.generate("the", GREEDY)


def test_guard_counts_and_names_what_compiled(
    options: dict, shared_llm: LLM, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
):
    expected = shared_llm.generate("the", GREEDY)[0].outputs[0].token_ids
    request.getfixturevalue("forgetful")
    with LLM(**options | {"strict_compile": False}) as llm:
        assert llm.stats.startup.programs == PROGRAMS - 2
        with caplog.at_level(logging.WARNING):
            assert llm.generate("the", GREEDY)[0].outputs[0].token_ids == expected
        assert llm.stats.compiles_after_warmup == 2
        messages = [record.getMessage() for record in caplog.records if "compiled after warm-up" in record.getMessage()]
        assert len(messages) == 2
        assert "('forward', 16)" in messages[0]
        assert "('sample', 8)" in messages[1]
        llm.generate("the", GREEDY)
        assert llm.stats.compiles_after_warmup == 2


def test_random_weights_from_a_config_alone(options: dict, broken: Callable[..., str]):
    model = broken(without="model.safetensors")
    runs = []
    for seed in (1, 1, 2):
        with LLM(**options | {"model": model, "load_format": "dummy", "seed": seed}) as llm:
            runs.append(llm.generate("the water wheel", GREEDY)[0].outputs[0].token_ids)
    assert runs[0] == runs[1] != runs[2]


def test_supported_tasks(shared_llm: LLM):
    assert shared_llm._front.engine.core.runner.supported_tasks == ("generate",)


@pytest.mark.parametrize(
    ("backend", "load_format"),
    [("native", "auto"), ("native", "dummy"), ("xla", "auto"), pytest.param("xla", "dummy", marks=pytest.mark.slow)],
)
def test_programs_compiled_ahead_are_those_of_a_start(options: dict, tmp_path: Path, load_format: str, backend: str):
    if backend == "native" and not native.available():
        pytest.skip(f"the native library is {native.status()}")
    fresh = options | {"compile_cache_dir": str(tmp_path / "programs"), "num_blocks_override": None}
    fresh |= {"kv_cache_memory_bytes": 1 << 20, "load_format": load_format, "linear_backend": backend}
    report = compile_programs(EngineConfig.from_options(**fresh))
    assert report.compiled == report.programs == PROGRAMS
    with LLM(**fresh) as llm:
        assert llm.stats.startup.compiled == 0
        assert llm.stats.startup.memory == dataclasses.replace(
            report.memory, available=llm.stats.startup.memory.available
        )
        assert llm.generate("the", GREEDY)[0].finished


def test_compiling_ahead_without_a_cache_is_refused(options: dict):
    with pytest.raises(ConfigError, match=r"compile_cache_dir .*name a folder"):
        compile_programs(EngineConfig.from_options(**options | {"compile_cache_dir": ""}))
