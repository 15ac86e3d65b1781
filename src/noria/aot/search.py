"""Which mesh and which buckets: what each would do at the roofline, without compiling any of them.

Copies of the engine fill the topology: with a tensor_parallel_size of 4, eight devices hold two of them. The
expert_parallel_size and the data_parallel_size stay as they are, and so does an attention_data_parallel_size that was
given; without one it is tried where tensor parallelism over as many devices would copy KV heads, and with them the
cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from noria.aot.estimate import Speed
from noria.aot.hlo import Exchange
from noria.aot.programs import ProgramFigures
from noria.aot.roofline import bytes_sent
from noria.aot.setup import Setup, copies_in_slice, prepare, sizes_for
from noria.aot.topologies import Topology
from noria.batch.buckets import Buckets, pick
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.registry import build_model

_GAPS = (0, 128, 256, 512, 1024)  # of token buckets
_CLOSE = 0.02  # what differs by less is the same
_SAMPLES = 64  # sizes of steps that buckets are judged by


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """reason: why it cannot be had; the rest is None or 0 then. Speeds are of one copy."""

    tensor_parallel_size: int
    copies: int
    attention_data_parallel_size: int = 1
    reason: str | None = None
    cache_tokens: int = 0  # of one copy
    decode: Speed | None = None
    prefill: Speed | None = None

    @property
    def tokens_per_s(self) -> float:
        """All copies decoding."""
        return 0.0 if self.decode is None else self.copies * self.decode.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoice:
    """waste: the time that padding adds to a step, as a share, over steps of all sizes."""

    token_bucket_gap: int
    programs: int
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was tried, and a config with what is recommended: the mesh whose copies decode most tokens a second together
    (of equals the one with the shortest steps), and the fewest buckets that waste hardly more time than the best."""

    meshes: tuple[MeshChoice, ...]
    buckets: tuple[BucketChoice, ...]
    config: EngineConfig


def search(
    config: EngineConfig, model_config: Mapping[str, Any], topology: Topology, *, context: int | None = None
) -> Search:
    """config: its tensor_parallel_size and token_bucket_gap do not count, nor an attention_data_parallel_size of 1.
    context: see prepare.

    Raises ConfigError when the model fits no mesh, or the options are wrong; WeightsError like prepare.
    """
    choices = [_try(each, model_config, topology, context) for each in layouts(config, model_config, topology)]
    meshes = tuple(choice for choice, _ in choices)
    best = max(meshes, key=lambda choice: choice.tokens_per_s)
    if best.decode is None:
        most = max(meshes, key=lambda each: each.tensor_parallel_size * each.attention_data_parallel_size)
        raise ConfigError(f"no mesh of {topology.title} can be had; with the most devices: {most.reason}")
    # Of those that are as fast, the one whose steps are shortest.
    close = [pair for pair in choices if pair[0].tokens_per_s >= (1 - _CLOSE) * best.tokens_per_s]
    chosen, setup = min(close, key=lambda pair: pair[0].decode.seconds if pair[0].decode else math.inf)
    assert setup is not None
    buckets = tuple(_judge(setup, gap) for gap in _GAPS if gap < setup.config.max_num_batched_tokens)
    least = min(each.waste for each in buckets)
    gap = min((each for each in buckets if each.waste <= least + _CLOSE), key=lambda each: each.programs)
    return Search(
        meshes=meshes,
        buckets=buckets,
        config=dataclasses.replace(
            config,
            tensor_parallel_size=chosen.tensor_parallel_size,
            attention_data_parallel_size=chosen.attention_data_parallel_size,
            token_bucket_gap=gap.token_bucket_gap,
        ),
    )


def layouts(config: EngineConfig, model_config: Mapping[str, Any], topology: Topology) -> list[EngineConfig]:
    """What is tried, by the number of devices of a copy and then of its attention_data_parallel_size.

    Raises what sizes_for raises.
    """
    room = topology.num_devices // (copies_in_slice(config, topology) * config.expert_parallel_size)
    kv_heads, given = build_model(model_config).config.num_kv_heads, config.attention_data_parallel_size
    found = []
    for data in range(1, room + 1) if given == 1 else (given,):
        some = dataclasses.replace(config, attention_data_parallel_size=data)
        for tensor in sizes_for(model_config, topology, some):
            is_copied = config.expert_parallel_size * data * tensor > kv_heads  # with tensor parallelism alone
            if data == given or (is_copied and room % (data * tensor) == 0):
                found.append(dataclasses.replace(some, tensor_parallel_size=tensor))
    found.sort(key=lambda each: (each.num_devices, each.attention_data_parallel_size))
    return found or [dataclasses.replace(config, tensor_parallel_size=1)]


def _try(
    config: EngineConfig, model_config: Mapping[str, Any], topology: Topology, context: int | None
) -> tuple[MeshChoice, Setup | None]:
    sizes: dict[str, Any] = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "attention_data_parallel_size": config.attention_data_parallel_size,
    }
    own = copies_in_slice(config, topology) * config.expert_parallel_size * math.prod(sizes.values())
    copies = topology.num_devices // own
    try:
        setup = prepare(config, model_config, topology, context=context)
    except ConfigError as error:
        return MeshChoice(**sizes, copies=copies, reason=str(error)), None
    estimate = setup.estimator(expected_programs(setup))
    choice = MeshChoice(
        **sizes,
        copies=copies,
        cache_tokens=int(setup.memory.max_concurrency * setup.config.max_model_len),
        decode=estimate.decode(setup.rows),
        prefill=estimate.prefill(setup.config.max_num_batched_tokens),
    )
    return choice, setup


def expected_programs(setup: Setup) -> list[ProgramFigures]:
    """Figures of forward passes and samplers that nobody compiled: what they send is known beforehand."""
    buckets, ranks = setup.runner.buckets, setup.config.num_ranks
    return [
        *(
            ProgramFigures(name=name, bucket=ranks * n, seconds=0.0, sent=expected_bytes(setup, n))
            for name in (("forward",) if setup.config.most_model_len is None else ("forward", "forward long"))
            for n in buckets.tokens
        ),
        *(ProgramFigures(name="sample", bucket=ranks * size, seconds=0.0) for size in buckets.requests),
    ]


def expected_bytes(setup: Setup, tokens: int) -> float:
    """That a device sends in a forward pass of so many tokens of its rank.

    In each layer a sum of what attention yields, one of MLP or experts, and one more where tokens share an MLP beside
    the experts, all in float32; and one of embeddings. Where attention is split by request, its sum is over the devices
    of the rank, and a gather of the residual stream follows, and one of its norm where there are experts; behind the
    last layer there are two more, the second of the rows to sample from. Other sums are over all devices of a copy.
    """
    c, parts = setup.model.config, setup.config.attention_data_parallel_size
    devices = setup.config.expert_parallel_size * setup.config.tensor_parallel_size
    own, itemsize = tokens * c.hidden_size, jnp.dtype(setup.dtype).itemsize
    mixtures = 0 if c.moe is None else c.num_layers - c.num_dense_layers
    shared = mixtures if c.moe is not None and c.moe.shared_size else 0
    every = [
        Exchange("all-reduce", 4 * own, c.num_layers, devices),
        Exchange("all-gather", itemsize * own * parts, c.num_layers + mixtures + 1, parts),
        Exchange("all-gather", itemsize * setup.runner.buckets.num_logit_rows * c.hidden_size * parts, 1, parts),
        Exchange("all-reduce", 4 * own * parts, c.num_layers + shared, devices * parts),
        Exchange("all-reduce", itemsize * own * parts, 1, devices * parts),
    ]
    return bytes_sent(every, devices)


def _judge(setup: Setup, gap: int) -> BucketChoice:
    config = dataclasses.replace(setup.config, token_bucket_gap=gap)
    buckets, budget = Buckets.of(config), config.max_num_batched_tokens // config.num_ranks
    estimate = setup.estimator(())
    steps = sorted({max(1, budget * index // _SAMPLES) for index in range(1, _SAMPLES + 1)})
    seconds = lambda tokens: estimate.of_prompts(tokens, expected_bytes(setup, tokens)).seconds
    needed = sum(map(seconds, steps))
    taken = sum(seconds(pick(buckets.tokens, tokens)) for tokens in steps)
    # A forward pass, or two, and the choice of hidden states for each token bucket.
    programs = (2 if config.most_model_len is None else 3) * len(buckets.tokens)
    return BucketChoice(token_bucket_gap=gap, programs=programs, waste=taken / needed - 1)
