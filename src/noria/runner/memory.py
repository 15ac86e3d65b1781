"""The memory plan: what the weights and the largest step take, and how many cache blocks the rest holds."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noria.batch.buckets import Buckets
from noria.cache.layout import CacheLayout, blocks_for_request
from noria.config import ResolvedConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.ops.ragged_paged_attention.api import KVCache
from noria.ops.ragged_paged_attention.cpu import scratch_bytes
from noria.ops.ragged_paged_attention.xla import DECODE_ROWS, KV_TILE, PREFILL_TOKENS

_MiB = 2**20
_CPU_CACHE_LIMIT = 1024 * _MiB  # of the cache on a CPU, where memory is the user's too, unless one request needs more


def _mib(count: float) -> str:
    return f"{count / _MiB:,.0f} MiB"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device."""

    available: int  # free when the engine started, times memory_utilization
    weights: int
    activations: int  # of the largest step, logits and the tables of shaped requests included
    block_bytes: int  # one block of the pool, over all its layer slots
    num_blocks: int  # of a rank, the null block included
    max_concurrency: float  # how many requests of max_model_len fit at the same time, on all ranks

    @property
    def cache(self) -> int:
        return self.block_bytes * self.num_blocks

    def __str__(self) -> str:
        return (
            f"memory: weights {_mib(self.weights)}, largest step {_mib(self.activations)}, KV cache {_mib(self.cache)} "
            f"({self.num_blocks:,} blocks, {self.max_concurrency:.1f} requests of max_model_len) "
            f"of {_mib(self.available)}"
        )


def plan_memory(
    config: ResolvedConfig,
    model: DecoderConfig,
    layout: CacheLayout,
    *,
    available: int,
    weights: int,
    activation_dtype_bytes: int,
    cache_dtype: str,
    on_cpu: bool,
    layer_block_bytes: int | None = None,
    head_block_bytes: int = 0,
    head_activations: int = 0,
) -> MemoryPlan:
    """model, weights: what one device has of them. layer_block_bytes: of one block in one layer slot; None: of the form
    that most attention back ends use. head_block_bytes, head_activations: what a draft head adds to a block of the pool
    and to the largest step; its weights are among `weights`.

    Raises ConfigError when the pool cannot hold one request of max_model_len tokens."""
    per_layer = layer_block_bytes
    if per_layer is None:
        sizes = (config.block_size, model.num_kv_heads, model.head_dim)
        per_layer = KVCache.bytes_per_block(*sizes, cache_dtype, model.cache_planes)
    block_bytes = per_layer * layout.slots + head_block_bytes
    activations = activation_bytes(config, model, activation_dtype_bytes) + head_activations
    chunk = min(config.max_num_batched_tokens // config.num_ranks, config.max_model_len)
    one_request = blocks_for_request(layout, config.max_model_len, config.block_size, chunk)
    smallest = one_request + 1  # the null block
    room = (available - weights - activations) // block_bytes
    if config.num_blocks_override is not None:
        num_blocks = config.num_blocks_override
    else:
        limit = config.kv_cache_memory_bytes
        if limit is None and on_cpu:
            limit = max(_CPU_CACHE_LIMIT, smallest * block_bytes)
        num_blocks = room if limit is None else min(room, limit // block_bytes)
    concurrency = config.num_ranks * (num_blocks - 1) / one_request
    plan = MemoryPlan(available, weights, activations, block_bytes, num_blocks, concurrency)
    if num_blocks < smallest:
        longest = _longest(config, layout, chunk, num_blocks)
        raise ConfigError(_too_small(config, plan, smallest, longest, is_memory=num_blocks == room))
    if num_blocks > max(room, 0):
        raise ConfigError(f"num_blocks_override ({num_blocks}) does not fit, lower it: {plan}")
    return plan


def _longest(config: ResolvedConfig, layout: CacheLayout, chunk: int, num_blocks: int) -> int:
    """The largest max_model_len of which so many blocks hold a request, in steps of a block; 0 for none."""
    size = config.block_size
    counts = range(1, -(-config.max_model_len // size))
    fits = lambda count: blocks_for_request(layout, count * size, size, min(chunk, count * size)) < num_blocks
    return size * bisect.bisect_left(counts, True, key=lambda count: not fits(count))


def _too_small(config: ResolvedConfig, plan: MemoryPlan, smallest: int, longest: int, *, is_memory: bool) -> str:
    """longest: the max_model_len that would do, if any. is_memory: whether nothing but the memory limits the pool."""
    needed = smallest * plan.block_bytes
    lower = f"lower max_model_len to {longest} or " if longest > 1 else ""
    text = (
        f"the KV cache would have {max(plan.num_blocks, 0)} blocks, but one request of max_model_len "
        f"({config.max_model_len}) tokens needs {smallest} ({_mib(needed)}); "
    )
    if config.num_blocks_override is not None:
        return f"{text}{lower}raise num_blocks_override to {smallest}"
    if not is_memory:
        return f"{text}{lower}raise kv_cache_memory_bytes to {needed}"
    text += f"of {_mib(plan.available)} weights take {_mib(plan.weights)}, the largest step {_mib(plan.activations)}; "
    ways = [f"lower max_model_len to {longest}"] if longest > 1 else []
    if plan.weights + needed <= plan.available:
        ways.append("lower max_num_seqs or max_num_batched_tokens")
    if plan.weights + plan.activations + needed <= plan.available / config.memory_utilization:
        ways.append("raise memory_utilization")
    if plan.weights >= plan.available:
        ways.append("use more devices (tensor_parallel_size) or fewer bits (quantization int8)")
    return text + (", or ".join(ways) or "lower max_num_seqs and max_model_len, or use more devices")


def activation_bytes(config: ResolvedConfig, model: DecoderConfig, dtype_bytes: int) -> int:
    """An upper estimate of what the largest step holds at a time besides weights and cache.

    The steps are as wide as their buckets. Products come out in float32 before they are rounded to the dtype.
    """
    buckets = Buckets.of(config)
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inside = 3 * model.intermediate_size if model.num_dense_layers else 0
    if model.moe is not None:
        # Of each chosen expert a row that goes in, one that comes out, and what is between.
        inside = max(inside, model.moe.routing.chosen * (3 * model.moe.size + 2 * model.hidden_size))
    per_token = 4 * (4 * model.hidden_size + inside) + 2 * dtype_bytes * heads
    # float32 logits and what the sampler makes of them: biased, penalized, scaled, noise, keys, masks (XLA's CPU
    # compiler reserves 11 of that size, 10 without shaping); and the two tables, made when a shaped request comes.
    # A mask of a grammar has a bit per token; there are three at a time at most.
    per_row = 12 * 4 * model.vocab_size + 3 * model.vocab_size // 8
    ranks = config.attention_data_parallel_size  # that share what is not attention
    tables = 2 * 4 * model.vocab_size
    return (
        (ranks * buckets.tokens[-1] + PREFILL_TOKENS) * per_token
        + ranks * buckets.num_logit_rows * (per_row + tables)
        + _attention_tile_bytes(model, dtype_bytes)
    )


def _attention_tile_bytes(model: DecoderConfig, dtype_bytes: int) -> int:
    """What one iteration of the attention loop gathers and computes, whatever the step and the back end."""
    keys_and_values = DECODE_ROWS * KV_TILE * model.num_kv_heads * 2 * model.head_dim
    scores = PREFILL_TOKENS * model.num_heads * KV_TILE
    accumulated = PREFILL_TOKENS * model.num_heads * model.head_dim
    in_xla = keys_and_values * (4 + 2 * dtype_bytes) + 4 * (4 * scores + 4 * accumulated)
    return max(in_xla, (os.cpu_count() or 1) * scratch_bytes(model.head_dim))


def available_bytes(devices: Sequence[Any]) -> int:
    """Memory that is free on each of the devices (jax.Device); on a CPU what the system could give without swapping,
    divided by their number."""
    found = [device.memory_stats() for device in devices if device.platform != "cpu"]
    if found and all(found):
        return min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in found)
    return _system_bytes() // len(devices)


def _system_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
