"""Which logical axis is split over which axes of the mesh. Models name the former and know nothing of the latter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.parallel.mesh import ATTENTION_DATA, EXPERT, MODEL

AnyMesh = Mesh | AbstractMesh
# Matrices of the MLP and the vocabulary are split over whatever attention leaves to them, too. An axis that is missing
# here is one too many: what it means must be thought about.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": (),
        "embed": (),
        "head_dim": (),
        "heads": (MODEL,),
        "kv_heads": (MODEL,),
        "mlp": (ATTENTION_DATA, EXPERT, MODEL),
        "vocab": (ATTENTION_DATA, EXPERT, MODEL),
    }
)


def mesh_axes(axis: str, mesh: AnyMesh) -> tuple[str, ...]:
    """Of those that the mesh has, the ones that a logical axis is split over."""
    return tuple(name for name in RULES[axis] if name in mesh.shape)


def num_shards(axis: str, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[name] for name in mesh_axes(axis, mesh))


def partition(axes: Sequence[str | None], sizes: Sequence[int], mesh: AnyMesh) -> PartitionSpec:
    """axes: the logical axis of each dimension, None for one that is never split. sizes: of the dimensions.

    A vocabulary that does not divide is not split: it costs memory and not correctness, and nobody chose its size.
    """

    def one(axis: str | None, size: int) -> str | tuple[str, ...] | None:
        if axis is None or not (names := mesh_axes(axis, mesh)):
            return None
        if axis == "vocab" and size % num_shards(axis, mesh):
            return None
        return names[0] if len(names) == 1 else names

    return PartitionSpec(*map(one, axes, sizes))


def check_sizes(config: DecoderConfig, tensor_parallel_size: int) -> None:
    """Raises ConfigError when heads or the MLP cannot be split so often, with what can be."""
    if tensor_parallel_size not in (good := possible_sizes(config)):
        raise ConfigError(
            f"tensor_parallel_size ({tensor_parallel_size}) must divide the model's {config.num_heads} attention heads "
            f"and its intermediate_size ({config.intermediate_size}), and divide its {config.num_kv_heads} KV heads or "
            f"be a multiple of them; possible: {', '.join(map(str, good))}"
        )


def possible_sizes(config: DecoderConfig) -> tuple[int, ...]:
    """Of tensor_parallel_size, ascending."""
    return tuple(size for size in range(1, config.num_heads + 1) if _divides(config, size))


def _divides(config: DecoderConfig, size: int) -> bool:
    kv = config.num_kv_heads
    return not (config.num_heads % size or config.intermediate_size % size or (kv % size and size % kv))


def kv_copies(config: DecoderConfig, mesh: AnyMesh) -> int:
    """How often each KV head is stored: where there are fewer of them than shards, several shards have the same one."""
    return max(1, num_shards("kv_heads", mesh) // config.num_kv_heads)


def with_kv_copies(config: DecoderConfig, mesh: AnyMesh) -> DecoderConfig:
    """The model that the programs see, in which a copy of a KV head is a head."""
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * kv_copies(config, mesh))


def on_one_device(config: DecoderConfig, mesh: AnyMesh) -> DecoderConfig:
    """What one device has of the model that the programs see."""
    vocab = 1 if config.vocab_size % num_shards("vocab", mesh) else num_shards("vocab", mesh)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // num_shards("heads", mesh),
        num_kv_heads=config.num_kv_heads // num_shards("kv_heads", mesh),
        intermediate_size=config.intermediate_size // num_shards("mlp", mesh),
        vocab_size=config.vocab_size // vocab,
    )
