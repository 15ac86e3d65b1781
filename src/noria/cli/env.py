"""`noria env`: what a bug report should say about the machine."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from noria import __version__
from noria.cli import options
from noria.config import cache_home

_TEXT = "Shows versions, devices and folders: what a bug report should say."
_PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "huggingface-hub")


def main(args: Sequence[str]) -> int:
    options.parse("env", _TEXT, args, [])
    home = cache_home()
    rows = [
        ("noria", f"{__version__} in {Path(__file__).parents[1]}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        ("devices", _devices()),
        ("native", _native()),
        ("models", _contents(home / "models", "*.gguf")),
        ("programs", _contents(home / "programs", "*")),
    ]
    for name, value in rows:
        print(f"{name:10}{value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _devices() -> str:
    import jax  # takes a second, and --help does not need it

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"none: {' '.join(str(error).split())}"
    first = devices[0]
    return f"{len(devices)} x {first.device_kind} ({first.platform}), used is {first}"


def _native() -> str:
    from noria.ops import native  # imports jax too

    return native.status()


def _contents(folder: Path, pattern: str) -> str:
    files = [file for file in folder.glob(pattern) if file.is_file() and not file.name.startswith(".")]
    size = sum(file.stat().st_size for file in files) / 2**20
    return f"{len(files)} files, {size:,.0f} MiB in {folder}"
