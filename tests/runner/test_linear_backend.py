"""A linear back end that was asked for by name and cannot be had is refused before anything is loaded."""

from __future__ import annotations

import pytest

from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError
from noria.ops import native
from noria.runner.runner import _linear_backend


def config(backend: str) -> ResolvedConfig:
    options = {"linear_backend": backend, "compile_cache_dir": ""}
    return EngineConfig.from_options(model="m", **options).resolve(ModelLimits(64, 10), "cpu")


@pytest.mark.parametrize(("dtype", "platform", "why"), [("float16", "cpu", "float16"), ("float32", "tpu", "not tpu")])
def test_native_where_it_cannot_run(dtype: str, platform: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"linear_backend native cannot be used: .*{why}"):
        _linear_backend(config("native"), dtype, platform)


def test_native_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(ConfigError, match=r"the library is .*; use auto or xla"):
        _linear_backend(config("native"), "float32", "cpu")


def test_auto_is_never_refused() -> None:
    assert _linear_backend(config("auto"), "float16", "cpu") == "xla"
    assert _linear_backend(config("auto"), "float32", "cpu") == "auto"
