"""Which model to plan for: all that is needed is its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from noria.errors import WeightsError
from noria.weights.checkpoint import open_checkpoint


def bundled() -> tuple[str, ...]:
    """Names of the models whose configs come with the package."""
    folder = _folder()
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def load_config(model: str) -> Mapping[str, Any]:
    """model: a folder with config.json, such a file, a .gguf file, or the name of a bundled config.

    Raises WeightsError when it is none of them.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".gguf" and path.is_file():
        return _config_of_gguf(path)
    if path.is_file():
        text, name = path.read_bytes(), str(path)
    elif model in bundled():
        text, name = (_folder() / f"{model}.json").read_bytes(), model
    else:
        raise WeightsError(
            f"{model} is neither a folder with config.json, nor such a file, nor a .gguf file, nor one of "
            f"{', '.join(bundled())}"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{name} must hold a JSON object")
    return config


def _config_of_gguf(path: Path) -> Mapping[str, Any]:
    """dtype: of the weights on a TPU, where blocks are unpacked."""
    with open_checkpoint(path) as checkpoint:
        return {**checkpoint.config, "dtype": "bfloat16" if checkpoint.quantized else checkpoint.native_dtype}


def _folder() -> Traversable:
    return resources.files("noria.aot") / "configs"
