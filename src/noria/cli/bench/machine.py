"""`noria bench machine`: the limits of this machine, measured once and kept."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria import __version__
from noria.cli import options
from noria.cli.display import note
from noria.config import cache_home
from noria.errors import NoriaError
from noria.observe.machine import processor, product_rate, read_bandwidth

_TEXT = """Measures how fast this machine reads memory and multiplies, in a few seconds.

The figures are kept in the cache folder for the other benchmarks; nothing else should run meanwhile."""


@dataclass(frozen=True)
class Limits:
    """read_gb_s: 10**9 bytes per second, all cores together; gflop_s: 10**9 operations per second, float32 product."""

    processor: str
    cores: int
    instruction_sets: tuple[str, ...]
    read_gb_s: float
    gflop_s: float


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "bench machine",
        _TEXT,
        args,
        [
            options.option("remeasure", bool, False, "measure again although there are figures of this machine"),
            options.option("json", bool, False, "print one JSON object instead of the text"),
        ],
    )
    found = limits(remeasure=chosen.remeasure)
    values = dataclasses.asdict(found) | versions()
    if chosen.json:
        print(json.dumps(values))
        return 0
    print(f"processor  {found.processor}, {found.cores} cores ({', '.join(found.instruction_sets)})")
    print(f"memory     {found.read_gb_s:.1f} GB/s read by all cores together")
    print(f"products   {found.gflop_s:.0f} GFLOP/s in float32")
    print(f"versions   python {values['python']}, jax {values['jax']}, noria {values['noria']}")
    print(f"native     {values['native']}")
    return 0


def versions() -> dict[str, str]:
    """What a result must say about the software, by name."""
    from noria.ops import native  # imports jax

    return {
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "noria": __version__,
        "native": native.status().partition(" in ")[0],
    }


def limits(*, remeasure: bool = False) -> Limits:
    """Of this machine: from the cache folder when it was measured before with as many cores."""
    here = processor()
    path = cache_home() / "machine.json"
    known = _read(path)
    if not remeasure and (old := known.get(here.key)) is not None:
        return old
    note("measuring this machine")
    figures = Limits(
        here.name,
        here.cores,
        here.instruction_sets,
        read_gb_s=round(read_bandwidth(here.cores) / 1e9, 2),
        gflop_s=round(max(product_rate(lambda a, b: a @ b), product_rate(_xla_product())) / 1e9, 1),
    )
    try:
        _write(path, known | {here.key: figures})
    except OSError as error:
        note(f"the figures are not kept: {path}: {error.strerror or error}")
    return figures


def limits_measured_apart() -> Limits:
    """Like limits; measured in a process of its own, so that its memory does not count as that of an engine here.

    Raises NoriaError when that fails.
    """
    if (known := _read(cache_home() / "machine.json").get(processor().key)) is not None:
        return known
    note("measuring this machine")
    command = [sys.executable, "-m", "noria", "bench", "machine", "--json"]
    # Another device belongs to the engine, and to one process at a time.
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        *_, reason = ["it said nothing", *done.stderr.split("\n")[:-1]]
        raise NoriaError(f"noria bench machine ended with status {done.returncode}: {reason}")
    told = json.loads(done.stdout)
    return _limits({field.name: told[field.name] for field in dataclasses.fields(Limits)})


def _xla_product() -> Any:
    import jax

    multiply, device = jax.jit(lambda a, b: a @ b), jax.devices("cpu")[0]

    def product(a: Any, b: Any) -> None:
        with jax.default_device(device):
            multiply(a, b).block_until_ready()

    return product


def _read(path: Path) -> dict[str, Limits]:
    """By key of the processor; {} when there is no such file, or one of another version."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {key: _limits(entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _limits(entry: dict[str, Any]) -> Limits:
    return Limits(**{**entry, "instruction_sets": tuple(entry["instruction_sets"])})


def _write(path: Path, entries: dict[str, Limits]) -> None:
    """In one piece, since two benchmarks may end at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump({key: dataclasses.asdict(entry) for key, entry in entries.items()}, file, indent=1)
    Path(file.name).replace(path)
