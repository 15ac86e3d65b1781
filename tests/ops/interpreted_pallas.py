"""The Pallas kernel for TPUs on a CPU, with caches as the other back ends have them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from noria.ops.ragged_paged_attention import tpu
from noria.ops.ragged_paged_attention.api import CACHE_DTYPES, KVCache
from noria.ops.ragged_paged_attention.tpu_lines import Lines

# True: XLA compiles what the kernel means, which is fast. The other runs it step by step as a TPU would, with copies
# that take effect when they are waited for, and fast memory full of NaN; it prints "RACE DETECTED" where one is.
FAST, STRICT = True, pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan", detect_races=True)


def to_lines(cache: KVCache) -> tuple[KVCache, Lines]:
    rows, size, kv_heads, planes, head_dim = cache.data.shape
    lines = Lines(kv_heads, head_dim, cache.dtype, planes)
    unsigned = jnp.dtype(f"uint{8 * CACHE_DTYPES[cache.dtype].itemsize}")
    bits = lax.bitcast_convert_type(cache.data, unsigned)
    data = lines.pack(*(bits[..., plane, :] for plane in range(planes)))
    scale = None
    if cache.scale is not None:
        line, lane = lines.scale_place(size)
        scale = jnp.full((rows, 1, lines.scale_lines(size), 128), jnp.nan)
        scale = scale.at[:, 0, line, lane].set(cache.scale)
    return KVCache(data, scale, cache.dtype), lines


def from_lines(cache: KVCache, lines: Lines, like: KVCache) -> KVCache:
    bits = jnp.stack(lines.unpack(cache.data), axis=-2)
    data = lax.bitcast_convert_type(bits, like.data.dtype)
    scale = cache.scale
    if scale is not None:
        line, lane = lines.scale_place(cache.block_size)
        scale = scale[:, 0, line, lane]
    return KVCache(data, scale, cache.dtype)


def ragged_paged_attention(q: Any, k: Any, v: Any, cache: Any, *rest: Any, **options: Any) -> Any:
    """The op of ops/ragged_paged_attention/tpu.py, interpreted."""
    options = {"interpret": FAST, **options}
    in_lines, lines = to_lines(jax.tree.map(jnp.asarray, cache))
    out, after = tpu.ragged_paged_attention(q, k, v, in_lines, *rest, **options)
    return out, from_lines(after, lines, cache)


strict = partial(ragged_paged_attention, interpret=STRICT)
