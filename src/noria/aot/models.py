"""Which model to plan for: all that is needed is its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from noria.errors import WeightsError


def bundled() -> tuple[str, ...]:
    """Names of the models whose configs come with the package."""
    folder = _folder()
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def load_config(model: str) -> Mapping[str, Any]:
    """model: a folder with config.json, such a file, or the name of a bundled config.

    Raises WeightsError when it is none of them.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        text, name = path.read_text(encoding="utf-8"), str(path)
    elif model in bundled():
        text = (_folder() / f"{model}.json").read_text(encoding="utf-8")
        name = model
    else:
        raise WeightsError(
            f"{model} is neither a folder with config.json, nor such a file, nor one of {', '.join(bundled())}"
        )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise WeightsError(f"{name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{name} must hold a JSON object")
    return config


def _folder() -> Traversable:
    return resources.files("noria.aot") / "configs"
