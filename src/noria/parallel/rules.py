"""Which logical axis is split over which axes of the mesh. Models name the former and know nothing of the latter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.parallel.mesh import ATTENTION_DATA, DATA, EXPERT, MODEL, MeshShape

AnyMesh = Mesh | AbstractMesh
# Axes whose devices keep different requests, from the slowest to the fastest: a place along them is a rank.
RANKS = (DATA, ATTENTION_DATA)
# Devices along `expert` are there for models with experts, each of which is on some of them, and share all else, too.
# Matrices of the MLP and the vocabulary are split over whatever attention leaves to them, too. An axis that is missing
# here is one too many: what it means must be thought about.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": (),
        "embed": (),
        "head_dim": (),
        "latent": (),
        "heads": (EXPERT, MODEL),
        "kv_heads": (EXPERT, MODEL),
        "mlp": (ATTENTION_DATA, EXPERT, MODEL),
        "router": (),
        "expert": (ATTENTION_DATA, EXPERT),
        "expert_mlp": (MODEL,),
        "vocab": (ATTENTION_DATA, EXPERT, MODEL),
        "draft_vocab": (),
        # Of activations. Between the layers of attention all devices of a copy of the model have all its tokens.
        "ranks": RANKS,
        "tokens": (DATA,),
    }
)


def mesh_axes(axis: str, mesh: AnyMesh) -> tuple[str, ...]:
    """Of those along which the mesh has several devices, the ones that a logical axis is split over.

    The others would split nothing, but XLA keeps a sum over one device as an exchange.
    """
    return tuple(name for name in RULES[axis] if mesh.shape.get(name, 1) > 1)


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


def check_mesh(model: DecoderConfig, config: EngineConfig, mesh: AnyMesh) -> None:
    """Raises ConfigError when the model cannot be split as the options say, or the mesh has other ranks than they."""
    data = config.attention_data_parallel_size
    check_sizes(model, config.tensor_parallel_size, config.expert_parallel_size, data)
    if (ranks := num_shards("ranks", mesh)) != config.num_ranks:
        raise ConfigError(
            f"data_parallel_size x attention_data_parallel_size is {config.num_ranks}, but the mesh has {ranks} "
            "such places; leave them out, where the mesh is made without them"
        )


def check_sizes(
    config: DecoderConfig,
    tensor_parallel_size: int,
    expert_parallel_size: int = 1,
    attention_data_parallel_size: int = 1,
) -> None:
    """Raises ConfigError when heads, the MLP or the experts cannot be split so often, with what can be."""
    moe = config.moe
    if expert_parallel_size > 1 and moe is None:
        raise ConfigError(
            f"expert_parallel_size ({expert_parallel_size}) is for models with experts, and this one has none; "
            "use tensor_parallel_size"
        )
    if moe is not None and moe.experts % expert_parallel_size:
        good = [size for size in range(1, moe.experts + 1) if moe.experts % size == 0]
        raise ConfigError(
            f"expert_parallel_size ({expert_parallel_size}) must divide the model's {moe.experts} experts; possible: "
            f"{', '.join(map(str, good))}"
        )
    if tensor_parallel_size not in (good := possible_sizes(config, expert_parallel_size)):
        times = "" if expert_parallel_size == 1 else f" times expert_parallel_size ({expert_parallel_size})"
        sizes = f" and its intermediate_size ({config.intermediate_size})" if config.num_dense_layers else ""
        inner = "" if moe is None else f" and tensor_parallel_size the {moe.size} of an expert;"
        raise ConfigError(
            f"tensor_parallel_size ({tensor_parallel_size}){times} must divide the model's {config.num_heads} "
            f"attention heads{sizes}, and divide its {config.num_kv_heads} KV heads or be a multiple of them;{inner} "
            f"possible: {', '.join(map(str, good)) or 'none'}"
        )
    _check_attention_data(config, tensor_parallel_size, expert_parallel_size, attention_data_parallel_size)


def _check_attention_data(config: DecoderConfig, tensor: int, expert: int, attention_data: int) -> None:
    """The other two sizes are possible ones."""
    moe, experts = config.moe, f"expert_parallel_size ({expert})"
    all_devices = f"{experts} x " * (expert > 1) + f"tensor_parallel_size ({tensor})"
    split = []
    if config.num_dense_layers:
        split.append(("intermediate_size", config.intermediate_size, expert * tensor, all_devices))
    if moe is not None:
        split.append(("number of experts", moe.experts, expert, experts))
        split.append(("size of shared experts", moe.shared_size, expert * tensor, all_devices))
    for what, size, others, named in split:
        if size % (attention_data * others):
            good = tuple(count for count in range(1, attention_data) if size % (count * others) == 0)
            raise ConfigError(
                f"attention_data_parallel_size ({attention_data}) x {named} devices share the MLP, so "
                f"{attention_data * others} must divide the model's {what} ({size}); "
                f"possible attention_data_parallel_size: {', '.join(map(str, good))}"
            )


def possible_sizes(
    config: DecoderConfig, expert_parallel_size: int = 1, attention_data_parallel_size: int = 1
) -> tuple[int, ...]:
    """Of tensor_parallel_size, ascending."""
    if config.moe is not None and config.moe.experts % (expert_parallel_size * attention_data_parallel_size):
        return ()
    others = expert_parallel_size, attention_data_parallel_size
    return tuple(size for size in range(1, config.num_heads + 1) if _divides(config, size, *others))


def shape_for_drafts(config: DecoderConfig, mesh: AnyMesh) -> MeshShape:
    """How a model that drafts for the one on the mesh is split over the same devices.

    It has the same ranks, each with a whole one of its own, which as many of the rank's devices share as its heads and
    its MLP allow. What is split otherwise (experts, or MLPs that ranks share) is for large models.
    """
    ranks = num_shards("ranks", mesh)
    devices = mesh.size // ranks
    return MeshShape(data=ranks, model=max(size for size in possible_sizes(config) if devices % size == 0))


def _divides(config: DecoderConfig, size: int, expert_parallel_size: int, attention_data: int) -> bool:
    kv, devices = config.num_kv_heads, size * expert_parallel_size
    if config.num_heads % devices or (kv % devices and devices % kv):
        return False
    if config.num_dense_layers and config.intermediate_size % (attention_data * devices):
        return False
    return config.moe is None or not (config.moe.size % size or config.moe.shared_size % (attention_data * devices))


def kv_copies(config: DecoderConfig, mesh: AnyMesh) -> int:
    """How often each KV head is stored: where there are fewer of them than shards, several shards have the same one."""
    return max(1, num_shards("kv_heads", mesh) // config.num_kv_heads)


def with_kv_copies(config: DecoderConfig, mesh: AnyMesh) -> DecoderConfig:
    """The model that the programs see, in which a copy of a KV head is a head."""
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * kv_copies(config, mesh))


def on_one_device(config: DecoderConfig, mesh: AnyMesh) -> DecoderConfig:
    """What one device has of the model that the programs see."""
    moe = config.moe
    if moe is not None:
        experts, size = moe.experts // num_shards("expert", mesh), moe.size // num_shards("expert_mlp", mesh)
        shared = moe.shared_size // num_shards("mlp", mesh)
        moe = dataclasses.replace(moe, experts=experts, size=size, shared_size=shared)
    vocab = 1 if config.vocab_size % num_shards("vocab", mesh) else num_shards("vocab", mesh)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // num_shards("heads", mesh),
        num_kv_heads=config.num_kv_heads // num_shards("kv_heads", mesh),
        intermediate_size=config.intermediate_size // num_shards("mlp", mesh),
        vocab_size=config.vocab_size // vocab,
        moe=moe,
    )
