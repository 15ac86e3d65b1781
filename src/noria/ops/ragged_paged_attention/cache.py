"""Writing new keys and values into the paged cache and reading them back: one meaning for every back end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.ragged_paged_attention.types import CACHE_DTYPES, KVCache, LayerAddress, RaggedBatch

_INT8_MAX = 127.0


def write(cache: KVCache, k: jax.Array, v: jax.Array | None, batch: RaggedBatch, layer: LayerAddress) -> KVCache:
    """The cache with the step's new keys and values at their places; padding tokens go to the layer's null block.

    k, v: [T, kv_heads, head_dim]; v is None where the values are the keys.
    """
    rows, block_size = batch.seq_lens.shape[0], cache.block_size
    table = batch.block_tables[layer.group]  # [R, B]
    block = table[jnp.minimum(batch.token_rows, rows - 1), batch.positions // block_size]
    block = layer.offset + jnp.where(batch.token_rows < rows, block, 0)
    place = (block, batch.positions % block_size)
    new = jnp.stack([k] if v is None else [k, v], axis=2)  # [T, kv_heads, 2 or 1, head_dim]
    if cache.scale is None:
        bits = lax.bitcast_convert_type(saturated(new, CACHE_DTYPES[cache.dtype]), cache.data.dtype)
        return dataclasses.replace(cache, data=cache.data.at[place].set(bits))
    data, scale = quantized(new)
    return dataclasses.replace(cache, data=cache.data.at[place].set(data), scale=cache.scale.at[place].set(scale))


def read(cache: KVCache, blocks: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of whole blocks. blocks: [..., n] -> two of [..., n * block_size, kv_heads, head_dim]."""
    pages = cache.data[blocks]  # [..., n, block_size, kv_heads, 2, head_dim]
    pages = lax.bitcast_convert_type(pages, CACHE_DTYPES[cache.dtype]).astype(dtype)
    if cache.scale is not None:
        pages = (pages.astype(jnp.float32) * cache.scale[blocks][..., None]).astype(dtype)
    pages = pages.reshape(*blocks.shape[:-1], -1, *pages.shape[-3:])
    return pages[..., 0, :], pages[..., -1, :]


def quantized(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 levels [..., n] of values [..., n], and the float32 scale [...] that gives the values back."""
    values = values.astype(jnp.float32)
    scale = jnp.max(jnp.abs(values), axis=-1) / _INT8_MAX
    levels = values / jnp.where(scale == 0, 1.0, scale)[..., None]
    return jnp.clip(jnp.round(levels), -_INT8_MAX, _INT8_MAX).astype(jnp.int8), scale


def saturated(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts to a narrower float without making infinities or NaNs out of finite values."""
    if jnp.dtype(dtype).itemsize >= values.dtype.itemsize:
        return values.astype(dtype)
    limit = jnp.finfo(dtype).max.astype(values.dtype)
    return jnp.clip(values, -limit, limit).astype(dtype)
