"""A back end that was asked for by name and cannot be had is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.models.registry import build_model
from noria.ops import native
from noria.ops.linear import api as linear
from noria.ops.ragged_paged_attention import api as attention
from noria.ops.ragged_paged_attention import tpu, xla
from noria.runner.backends import _choice, choose_ops

each_option = pytest.mark.parametrize("option", ["attention_backend", "linear_backend"])


def config(option: str, backend: str) -> ResolvedConfig:
    options = {option: backend, "compile_cache_dir": ""}
    return EngineConfig.from_options(model="m", **options).resolve(ModelLimits(64, 10), "cpu")


@each_option
@pytest.mark.parametrize(("dtype", "platform", "why"), [("float16", "cpu", "float16"), ("float32", "tpu", "not tpu")])
def test_native_where_it_cannot_run(option: str, dtype: str, platform: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} native cannot be used: .*{why}"):
        _choice(config(option, "native"), option, dtype, platform)


@each_option
def test_native_without_its_library(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(ConfigError, match=f"{option} native .* the library is .*; use auto or xla"):
        _choice(config(option, "native"), option, "float32", "cpu")


@each_option
def test_auto_is_never_refused(option: str) -> None:
    assert _choice(config(option, "auto"), option, "float16", "cpu") == "xla"
    assert _choice(config(option, "auto"), option, "float32", "cpu") == "auto"
    assert _choice(config(option, "auto"), option, "float32", "cpu", 2) == "xla"


def test_auto_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = dict(attention.BACKENDS)
    for found in (True, False):
        monkeypatch.setattr(native, "available", lambda found=found: found)
        assert attention.choose("auto", "cpu") is backends["native" if found else "xla"]
        assert attention.choose("auto", "tpu") is backends["xla"]
    assert attention.choose("reference", "cpu") is backends["reference"]


@pytest.mark.parametrize(("size", "why"), [(1, "it needs a TPU, not cpu"), (2, "it runs on one device")])
def test_the_kernels_of_the_linear_op_run_on_one_tpu(size: int, why: str) -> None:
    resolved = config("linear_backend", "pallas")
    with pytest.raises(ConfigError, match=f"linear_backend pallas cannot be used: {why}"):
        _choice(resolved, "linear_backend", "float32", "cpu", size)
    if size == 1:
        assert _choice(resolved, "linear_backend", "float32", "tpu") == "pallas"
        assert linear.choose("pallas", "tpu").name == "pallas"


def model(**changes: Any) -> DecoderConfig:
    names = {"architectures": ["LlamaForCausalLM"], "head_dim": 128, "hidden_size": 256, "intermediate_size": 512}
    numbers = {"max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 10}
    return build_model({**names, **numbers, "num_key_value_heads": 2, **changes}).config


def chosen(backend: str, platform: str, cache_dtype: str = "bfloat16", **changes: Any) -> Any:
    ops = choose_ops(config("attention_backend", backend), model(**changes), "bfloat16", cache_dtype, platform)
    return getattr(ops.attention, "func", ops.attention)


def test_a_tpu_has_the_pallas_kernel_where_it_takes_the_model() -> None:
    assert chosen("auto", "tpu") is tpu.ragged_paged_attention
    assert chosen("auto", "tpu", head_dim=64) is tpu.ragged_paged_attention
    assert chosen("auto", "tpu", cache_dtype="int8") is tpu.ragged_paged_attention
    assert chosen("auto", "tpu", cache_dtype="float16") is xla.ragged_paged_attention
    assert chosen("auto", "tpu", head_dim=512) is xla.ragged_paged_attention
    assert chosen("auto", "gpu") is xla.ragged_paged_attention


@pytest.mark.parametrize(
    ("platform", "changes", "why"),
    [
        ("cpu", {}, "it needs a TPU, not cpu"),
        ("tpu", {"head_dim": 512}, "heads of 512, more than 256"),
        ("tpu", {"cache_dtype": "float16"}, "a cache of float16"),
    ],
)
def test_pallas_where_it_cannot_run(platform: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend pallas cannot be used: {why}"):
        chosen("pallas", platform, **changes)
