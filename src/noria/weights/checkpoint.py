"""Opening a model from disk."""

from __future__ import annotations

from pathlib import Path

from noria.errors import WeightsError
from noria.weights.base import Checkpoint
from noria.weights.folder import FolderCheckpoint
from noria.weights.gguf import GgufCheckpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: Path, config_only: bool = False) -> Checkpoint:
    """Open a folder (config.json and safetensors files) or a .gguf file.

    config_only: of a folder look at nothing but its config; it need not have tensors.
    Raises WeightsError when it is neither, or is incomplete, damaged or of an unsupported kind.
    """
    path = Path(path)
    if path.is_dir():
        return FolderCheckpoint(path, config_only)
    if not path.exists():
        raise WeightsError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise WeightsError(f"{path} is not a model: name a folder with config.json and *.safetensors, or a .gguf file")
