"""A back end that was asked for by name and cannot be had is refused before anything is loaded."""

from __future__ import annotations

import pytest

from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError
from noria.ops import native
from noria.ops.ragged_paged_attention import api as attention
from noria.runner.runner import _backend

each_option = pytest.mark.parametrize("option", ["attention_backend", "linear_backend"])


def config(option: str, backend: str) -> ResolvedConfig:
    options = {option: backend, "compile_cache_dir": ""}
    return EngineConfig.from_options(model="m", **options).resolve(ModelLimits(64, 10), "cpu")


@each_option
@pytest.mark.parametrize(("dtype", "platform", "why"), [("float16", "cpu", "float16"), ("float32", "tpu", "not tpu")])
def test_native_where_it_cannot_run(option: str, dtype: str, platform: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} native cannot be used: .*{why}"):
        _backend(config(option, "native"), option, dtype, platform)


@each_option
def test_native_without_its_library(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(ConfigError, match=f"{option} native .* the library is .*; use auto or xla"):
        _backend(config(option, "native"), option, "float32", "cpu")


@each_option
def test_auto_is_never_refused(option: str) -> None:
    assert _backend(config(option, "auto"), option, "float16", "cpu") == "xla"
    assert _backend(config(option, "auto"), option, "float32", "cpu") == "auto"


def test_auto_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = dict(attention.BACKENDS)
    for found in (True, False):
        monkeypatch.setattr(native, "available", lambda found=found: found)
        assert attention.choose("auto", "cpu") is backends["native" if found else "xla"]
        assert attention.choose("auto", "tpu") is backends["xla"]
    assert attention.choose("reference", "cpu") is backends["reference"]
