"""Ragged paged attention, spelled out: the contract that every other implementation is tested against.

Each token looks at its row's whole block table, so the work grows with the table, not with the sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from noria.ops.ragged_paged_attention.cache import read, write
from noria.ops.ragged_paged_attention.types import KVCache, LayerAddress, RaggedBatch


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
) -> tuple[jax.Array, KVCache]:
    """See api.py."""
    cache = write(cache, k, v, batch, layer)
    rows, tokens = batch.seq_lens.shape[0], q.shape[0]
    table = batch.block_tables[layer.group][jnp.minimum(batch.token_rows, rows - 1)] + layer.offset  # [T, B]
    keys, values = read(cache, table, jnp.float32)  # [T, L, kv_heads, head_dim]
    kv_heads, head_dim = keys.shape[2:]
    grouped = q.reshape(tokens, kv_heads, -1, head_dim).astype(jnp.float32)
    scores = jnp.einsum("thgd,tlhd->thgl", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    age = batch.positions[:, None] - jnp.arange(keys.shape[1])[None, :]  # [T, L]
    seen = (age >= 0) & (age < layer.window) & (batch.token_rows < rows)[:, None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jnp.where(seen[:, None, None], jax.nn.softmax(scores, axis=-1), 0)
    values = jnp.where(seen[:, :, None, None], values, 0)
    out = jnp.einsum("thgl,tlhd->thgd", weights, values)
    return out.reshape(q.shape).astype(q.dtype), cache
