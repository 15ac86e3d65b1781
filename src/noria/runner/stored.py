"""Compiled programs in a folder: written on one machine, fetched by another that has the same versions.

JAX's persistent cache does not do here: its keys hold what only the machine with the devices knows. A folder has a
manifest, which says what the programs were made by and for, and a file per program. What came from that cache must not
be saved: on a CPU it lacks code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from noria.config import ResolvedConfig
from noria.errors import ConfigError

DRAFT_FOLDER = "draft"  # in the folder of a model: that of the draft model
_MANIFEST = "manifest.json"
_ROOMS = ("batch", "models", "nn", "ops", "parallel", "runner", "step")  # whose code is in the programs
_SPECULATION = "speculative_config"
_OPTIONS = (
    "data_parallel_size",
    "attention_data_parallel_size",
    "expert_parallel_size",
    "tensor_parallel_size",
    "device_order",
    "max_model_len",
    "most_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "token_bucket_gap",
    "extra_token_buckets",
    "block_size",
    "num_scheduler_steps",
    "quantization",
    "quantize_activations",
    "attention_backend",
    "linear_backend",
    "max_logprobs",
    "logprobs_mode",
)


def file_name(key: Hashable) -> str:
    """Of a program, without a suffix: ("sample shaped", 8) is sample-shaped-8."""
    parts = key if isinstance(key, tuple) else (key,)
    return "-".join(str(part).replace(" ", "-") for part in parts)


def origin_of(config: ResolvedConfig, model: Any, devices: Sequence[Any], **others: Any) -> dict[str, Any]:
    """What programs are made by and for, in words: versions first. model: a config, by whose text it is known.
    devices: jax.Devices of the mesh. others: more of that, by name."""
    platform = devices[0].platform
    versions = {name: metadata.version(name) for name in ("noria", "jax", "jaxlib")}
    versions["the code of noria"] = _code_digest()
    if platform == "tpu":
        versions["libtpu"] = metadata.version("libtpu")
    where = {"platform": platform, "kind of device": devices[0].device_kind, "number of devices": len(devices)}
    options = {name: getattr(config, name) for name in _OPTIONS} | {_SPECULATION: _drafts_of(config)}
    origin = versions | where | options | others | {"model": digest_of(model)}
    return json.loads(json.dumps(origin))  # as it will be read


def digest_of(config: Any) -> str:
    """By which a model is known."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]


def _drafts_of(config: ResolvedConfig) -> dict[str, Any] | None:
    """What programs depend on; which model drafts is said elsewhere, since on another machine it lies elsewhere."""
    if (options := config.speculation) is None:
        return None
    return {name: getattr(options, name) for name in ("method", "num_speculative_tokens", "quantization")}


def save(folder: Path, origin: Mapping[str, Any], num_blocks: int, programs: Mapping[Hashable, Any]) -> None:
    """num_blocks: of the cache that the programs take. programs: jax.stages.Compiled.

    Raises ConfigError when the folder cannot be written.
    """
    digests = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MANIFEST).unlink(missing_ok=True)  # until all is there
        for key, program in programs.items():
            payload, _, _ = serialize_executable.serialize(program)
            digests[file_name(key)] = hashlib.sha256(payload).hexdigest()
            (folder / f"{file_name(key)}.bin").write_bytes(payload)
        manifest = {"origin": origin, "num_blocks": num_blocks, "programs": digests}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out {folder}: {error.strerror}; choose another folder") from None


@dataclass(frozen=True)
class StoredPrograms:
    """What save wrote. The files hold machine code: open none that you do not trust."""

    folder: Path
    origin: Mapping[str, Any]
    num_blocks: int
    digests: Mapping[str, str]  # SHA-256 by file name

    @staticmethod
    def open(folder: Path) -> StoredPrograms:
        """Raises ConfigError when there are no programs in the folder."""
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            return StoredPrograms(folder, manifest["origin"], int(manifest["num_blocks"]), manifest["programs"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"programs_dir {folder}: there are no programs with a manifest; make them with noria compile "
                "--topology ... --out"
            ) from None

    def check(self, origin: Mapping[str, Any]) -> None:
        """origin: of the engine that is to run them. Raises ConfigError for the first thing that is not the same."""
        for name, here in origin.items():
            there = self.origin.get(name)
            if there == here:
                continue
            if name in (*_OPTIONS, _SPECULATION):
                fix = f"give it the same {name}, or make them anew with it"
            else:
                fix = "make them anew with noria compile, for and with what is here"
            raise ConfigError(
                f"programs_dir {self.folder}: its programs are for another {name}: {_say(there)} there, {_say(here)} "
                f"here; {fix}"
            )

    def load(self, key: Hashable, lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled:
        """The program that compiling `lowered` would yield. Raises ConfigError when it is missing or damaged."""
        name = file_name(key)
        try:
            payload = (self.folder / f"{name}.bin").read_bytes()
        except OSError:
            payload = b""
        if hashlib.sha256(payload).hexdigest() != self.digests.get(name):
            raise ConfigError(
                f"programs_dir {self.folder}: {name}.bin is missing or damaged; make it anew with noria compile"
            )
        program = serialize_executable.deserialize_and_load(
            payload,
            jax.tree.structure(lowered.args_info),
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=devices,
        )
        if _shapes(program) != _shapes(lowered):
            raise ConfigError(f"programs_dir {self.folder}: {name} takes arrays of other shapes; make it anew")
        return program

    def loader(self, devices: Sequence[Any]) -> Callable[[Hashable, jax.stages.Lowered], jax.stages.Compiled]:
        return lambda key, lowered: self.load(key, lowered, devices)


def _shapes(stage: Any) -> list[tuple[Any, Any]]:
    return [(info.shape, info.dtype) for info in jax.tree.leaves(stage.args_info)]


def _say(value: Any) -> str:
    return "none" if value in (None, []) else str(value)


def _code_digest() -> str:
    """Of the sources that make the programs, so that a change without a new version is seen, too."""
    digest = hashlib.sha256()

    def add(folder: Traversable) -> None:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                add(entry)
            elif entry.name.endswith(".py"):
                digest.update(entry.read_bytes())

    for room in _ROOMS:
        add(resources.files("noria") / room)
    return digest.hexdigest()[:16]
