"""Which mesh and which buckets: what each would do at the roofline, without compiling any of them.

Copies of the engine fill the topology: with a tensor_parallel_size of 4, eight devices hold two of them. The
expert_parallel_size and the data_parallel_size stay as they are.
"""

from __future__ import annotations

import dataclasses
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

_GAPS = (0, 128, 256, 512, 1024)  # of token buckets
_CLOSE = 0.02  # what differs by less is the same
_SAMPLES = 64  # sizes of steps that buckets are judged by


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """reason: why it cannot be had; the rest is None or 0 then. Speeds are of one copy."""

    tensor_parallel_size: int
    copies: int
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
    """config: its tensor_parallel_size and token_bucket_gap do not count. context: see prepare.

    Raises ConfigError when the model fits no mesh, or the options are wrong; WeightsError like prepare.
    """
    choices: list[tuple[MeshChoice, Setup | None]] = []
    own = copies_in_slice(config, topology) * config.expert_parallel_size
    for size in sizes_for(model_config, topology, config) or (1,):
        copies = topology.num_devices // (size * own)
        try:
            setup = prepare(
                dataclasses.replace(config, tensor_parallel_size=size), model_config, topology, context=context
            )
        except ConfigError as error:
            choices.append((MeshChoice(tensor_parallel_size=size, copies=copies, reason=str(error)), None))
            continue
        estimate = setup.estimator(expected_programs(setup))
        choice = MeshChoice(
            tensor_parallel_size=size,
            copies=copies,
            cache_tokens=int(setup.memory.max_concurrency * setup.config.max_model_len),
            decode=estimate.decode(setup.rows),
            prefill=estimate.prefill(setup.config.max_num_batched_tokens),
        )
        choices.append((choice, setup))
    meshes = tuple(choice for choice, _ in choices)
    best = max(meshes, key=lambda choice: choice.tokens_per_s)
    if best.decode is None:
        raise ConfigError(f"no mesh of {topology.title} can be had; with the most devices: {meshes[-1].reason}")
    # Of those that are as fast, the one whose steps are shortest.
    close = [(c, s) for c, s in choices if s is not None and c.tokens_per_s >= (1 - _CLOSE) * best.tokens_per_s]
    chosen, setup = close[-1]
    assert setup is not None
    buckets = tuple(_judge(setup, gap) for gap in _GAPS if gap < setup.config.max_num_batched_tokens)
    least = min(each.waste for each in buckets)
    gap = min((each for each in buckets if each.waste <= least + _CLOSE), key=lambda each: each.programs)
    return Search(
        meshes=meshes,
        buckets=buckets,
        config=dataclasses.replace(
            config, tensor_parallel_size=chosen.tensor_parallel_size, token_bucket_gap=gap.token_bucket_gap
        ),
    )


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
    """That a device sends in a forward pass of so many tokens of its rank: two sums in each layer, of what attention
    and MLP or experts yield, in float32, one more where tokens share an MLP beside the experts, and one of
    embeddings."""
    c, devices = setup.model.config, setup.config.num_devices // setup.config.num_ranks
    size = tokens * c.hidden_size
    shared = c.num_layers - c.num_dense_layers if c.moe is not None and c.moe.shared_size else 0
    sums = [
        Exchange("all-reduce", 4 * size, 2 * c.num_layers + shared),
        Exchange("all-reduce", jnp.dtype(setup.dtype).itemsize * size, 1),
    ]
    return bytes_sent(sums, devices)


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
