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
        bits = lax.bitcast_convert_type(_saturate(new, CACHE_DTYPES[cache.dtype]), cache.data.dtype)
        return dataclasses.replace(cache, data=_set(cache.data, place, bits))
    new = new.astype(jnp.float32)
    scale = jnp.max(jnp.abs(new), axis=-1) / _INT8_MAX  # [T, kv_heads, 2]
    levels = new / jnp.where(scale == 0, 1.0, scale)[..., None]
    data = jnp.clip(jnp.round(levels), -_INT8_MAX, _INT8_MAX).astype(jnp.int8)
    return dataclasses.replace(cache, data=_set(cache.data, place, data), scale=_set(cache.scale, place, scale))


def _set(array: jax.Array, place: tuple[jax.Array, jax.Array], new: jax.Array) -> jax.Array:
    """new: [T, kv_heads, 2, ...], whose axes may be joined in the array."""
    return array.at[place].set(new.reshape(-1, *array.shape[2:]))


def read(cache: KVCache, blocks: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of whole blocks. blocks: [..., n] -> two of [..., n * block_size, kv_heads, head_dim]."""
    pages = cache.data[blocks]  # [..., n, block_size, kv_heads, 2, head_dim] or with two axes joined
    pages = lax.bitcast_convert_type(pages, CACHE_DTYPES[cache.dtype]).astype(dtype)
    if cache.scale is not None:
        pages = (pages.astype(jnp.float32) * cache.scale[blocks][..., None]).astype(dtype)
    tokens = blocks.shape[-1] * cache.block_size
    pages = pages.reshape(*blocks.shape[:-1], tokens, -1, cache.planes, pages.shape[-1])
    return pages[..., 0, :], pages[..., -1, :]


def _saturate(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts to a narrower float without making infinities or NaNs out of finite values."""
    if jnp.dtype(dtype).itemsize >= values.dtype.itemsize:
        return values.astype(dtype)
    limit = jnp.finfo(dtype).max.astype(values.dtype)
    return jnp.clip(values, -limit, limit).astype(dtype)
