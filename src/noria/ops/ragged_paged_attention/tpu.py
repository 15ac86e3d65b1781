"""Ragged paged attention on TPUs: the Pallas kernel that comes with JAX, behind the signature of the others.

The kernel keeps the pages in HBM and copies those of a row to fast memory while it computes with the ones before. New
keys and values are written by XLA's scatter beforehand. Its sliding window is a constant of the kernel, so there is
one for each window a model has, and the layer chooses; pages before the window are read all the same.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.ragged_paged_attention.cache import write
from noria.ops.ragged_paged_attention.types import CACHE_DTYPES, FULL_ATTENTION, KVCache, LayerAddress, RaggedBatch

LANES = 128  # the kernel's head_dim is a multiple of it
_BUFFER = 4 << 20  # bytes of fast memory for the pages of a row that are used and those that are fetched meanwhile
_MAX_TOKENS = 1024  # of them; more gain nothing
_QUERIES = 32  # tokens that share what is fetched
_DTYPES = ("float32", "bfloat16")  # of the cache


def unsupported(kv_heads: int, head_dim: int, dtype: str, cache_dtype: str) -> str | None:
    """Why the kernel cannot be had for these sizes (of one device) and dtypes; None when it can."""
    if cache_dtype not in _DTYPES or dtype not in _DTYPES:
        return f"a cache of {cache_dtype}" if dtype in _DTYPES else f"activations in {dtype}"
    if head_dim % LANES:
        return f"heads of {head_dim}, which is no multiple of {LANES}"
    words = 2 * kv_heads * CACHE_DTYPES[cache_dtype].itemsize / 4  # a token's keys and values, in rows of 32 bits
    if words not in (1, 2, 4, 8) and words % 8:
        return f"{kv_heads} KV heads in {cache_dtype}, which do not fill the tiles of the memory"
    return None


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cache: KVCache,
    batch: RaggedBatch,
    layer: LayerAddress,
    *,
    scale: float,
    soft_cap: float | None = None,
    windows: tuple[int, ...] = (FULL_ATTENTION,),
) -> tuple[jax.Array, KVCache]:
    """See api.py. windows: all that layer.window may be."""
    # Here, because its import takes longer than all of noria's, and CPUs have no use for it.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as kernel

    cache = write(cache, k, v, batch, layer)
    pages = cache.data
    _, block_size, keys_and_values, head_dim = pages.shape
    # A row that has ended still has its token, and the kernel must have something to read for it.
    seq_lens = jnp.maximum(batch.seq_lens, 1)
    table = batch.block_tables[layer.group] + layer.offset

    token_bytes = keys_and_values * head_dim * pages.dtype.itemsize
    tokens = min(_MAX_TOKENS, _BUFFER // (2 * token_bytes))
    pages_at_a_time = max(1, min(table.shape[1], tokens // block_size))

    def attend(window: int) -> jax.Array:
        return kernel(
            q,
            pages,
            seq_lens,
            table,
            batch.query_start,
            batch.distribution[2:],
            sm_scale=scale,
            sliding_window=None if window == FULL_ATTENTION else window,
            soft_cap=soft_cap,
            # JAX has a table of the best sizes, but chooses by the device that is there, which may be none.
            num_kv_pages_per_block=pages_at_a_time,
            num_queries_per_block=min(_QUERIES, q.shape[0]),
        )

    if len(windows) == 1:
        out = attend(windows[0])
    else:
        which = jnp.argmax(jnp.asarray(windows) == layer.window)
        out = lax.switch(which, [partial(attend, window) for window in windows])
    # What no row owns is left as the memory was.
    return jnp.where((batch.token_rows < batch.seq_lens.shape[0])[:, None, None], out, 0), cache
