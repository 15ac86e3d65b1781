"""Ragged paged attention in plain XLA: loops whose trip counts follow the sequences, not max_model_len.

Online softmax over tiles of the KV sequence (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax";
Dao et al. 2022, "FlashAttention"). Tiles begin at multiples of KV_TILE from the start of the sequence whatever the
batch looks like, and a tile that a row does not see leaves the row's state unchanged to the last bit: in float32 the
result of a token does not depend on chunking, batch mates, or whether it is computed as a decode or a prefill row.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.ragged_paged_attention.cache import read, write
from noria.ops.ragged_paged_attention.types import KVCache, LayerAddress, RaggedBatch

KV_TILE = 128  # tokens of the KV sequence per inner iteration (rounded to whole blocks)
DECODE_ROWS = 8  # decode rows handled together
PREFILL_TOKENS = 64  # tokens of one prefill row handled together
_MASKED = -1e30  # finite, so that differences of two masked scores are not NaN


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
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    table = _pad_to_tiles(batch.block_tables[layer.group], cache.block_size) + layer.offset  # [R, B']
    attend = partial(_attend, cache=cache, table=table, window=layer.window, scale=scale, soft_cap=soft_cap)
    decode_end, total = batch.distribution[0], batch.distribution[2]

    # The last tile of a row reaches into the next row's tokens, or past the end; what it leaves there is overwritten.
    width = min(PREFILL_TOKENS, tokens)
    pad = max(width, DECODE_ROWS)
    queries = jnp.pad(q.reshape(tokens, kv_heads, group, head_dim), ((0, pad), (0, 0), (0, 0), (0, 0)))
    seq_lens = jnp.pad(batch.seq_lens, (0, DECODE_ROWS))

    def decode_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * DECODE_ROWS
        rows = start + jnp.arange(DECODE_ROWS)
        lens = jnp.where(rows < decode_end, lax.dynamic_slice(seq_lens, (start,), (DECODE_ROWS,)), 0)
        tile = lax.dynamic_slice(queries, (start, 0, 0, 0), (DECODE_ROWS, *queries.shape[1:]))
        result = attend(tile[:, None], rows, positions=(lens - 1)[:, None], valid=(lens > 0)[:, None])
        return lax.dynamic_update_slice(out, result[:, 0], (start, 0, 0, 0))

    lengths = jnp.diff(batch.query_start)  # [R]
    is_prefill = (jnp.arange(lengths.shape[0]) >= decode_end) & (jnp.arange(lengths.shape[0]) < total)
    tile_ends = jnp.cumsum(jnp.where(is_prefill, -(-lengths // width), 0))  # [R]: tiles of all rows up to this one

    def prefill_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tile_ends <= index)
        tiles = -(-lengths[row] // width)
        first = (index - (tile_ends[row] - tiles)) * width  # within the row
        start = batch.query_start[row] + first
        offsets = first + jnp.arange(width)
        positions = batch.seq_lens[row] - lengths[row] + offsets
        tile = lax.dynamic_slice(queries, (start, 0, 0, 0), (width, *queries.shape[1:]))
        result = attend(tile[None], row[None], positions=positions[None], valid=(offsets < lengths[row])[None])
        return lax.dynamic_update_slice(out, result[0], (start, 0, 0, 0))

    out = jnp.zeros_like(queries)
    out = lax.fori_loop(0, -(-decode_end // DECODE_ROWS), decode_tile, out)
    out = lax.fori_loop(0, tile_ends[-1], prefill_tile, out)
    return out[:tokens].reshape(q.shape), cache


def _pad_to_tiles(table: jax.Array, block_size: int) -> jax.Array:
    """The block table with null blocks at its end, so that a last, partial KV tile can be read whole."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % _blocks_per_tile(block_size))))


def _blocks_per_tile(block_size: int) -> int:
    return max(1, KV_TILE // block_size)


def _attend(
    q: jax.Array,  # [S, Q, kv_heads, group, head_dim]: Q queries of each of S rows
    rows: jax.Array,  # [S]
    *,
    positions: jax.Array,  # [S, Q]
    valid: jax.Array,  # [S, Q]: false for padding
    cache: KVCache,
    table: jax.Array,  # [R, B']
    window: jax.Array,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """Attention of a tile of queries over the KV tiles that any of them sees -> [S, Q, kv_heads, group, head_dim]."""
    count, width, kv_heads, group, head_dim = q.shape
    per_tile = _blocks_per_tile(cache.block_size)
    kv_tile = per_tile * cache.block_size
    # A matrix product with one row would take another code path on the CPU, with another order of summation.
    repeat = 2 if width * group == 1 else 1
    q = jnp.repeat(jnp.moveaxis(q, 2, 1).reshape(count, kv_heads, width * group, head_dim), repeat, axis=2)
    table = table[jnp.minimum(rows, table.shape[0] - 1)]  # [S, B']

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index, top, total, acc = state
        blocks = lax.dynamic_slice(table, (0, index * per_tile), (count, per_tile))
        keys, values = read(cache, blocks, q.dtype)  # [S, kv_tile, kv_heads, head_dim]
        age = positions[:, :, None] - (index * kv_tile + jnp.arange(kv_tile))  # [S, Q, kv_tile]
        seen = (age >= 0) & (age < window) & valid[:, :, None]
        # Rows share the cache with what others left there: an infinity in an unseen place must not become 0 * inf.
        values = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], values, 0)
        seen = jnp.repeat(seen, group * repeat, axis=1)[:, None]  # [S, 1, Q * group, kv_tile]
        scores = jnp.einsum("shqd,skhd->shqk", q, keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        fade = jnp.exp(top - new_top)
        # Summed by a matrix product: it takes each row in the same order, whereas XLA sums a plain reduction, and a
        # product with a vector, in ways that depend on the other dimensions.
        sums = lax.dot_general(
            weights.reshape(-1, kv_tile), jnp.ones((2, kv_tile)), (((1,), (1,)), ((), ())), lax.Precision.HIGHEST
        )
        total = total * fade + sums[:, 0].reshape(total.shape)
        mixed = _mix(weights.astype(q.dtype), values)
        return index + 1, new_top, total, acc * fade[..., None] + mixed

    first = jnp.min(jnp.where(valid, jnp.maximum(positions - window + 1, 0), 2**30)) // kv_tile
    last = jnp.max(jnp.where(valid, positions, -1)) // kv_tile
    shape = q.shape[:-1]
    start = (first, jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    _, _, total, acc = lax.while_loop(lambda state: state[0] <= last, step, start)
    out = acc / jnp.where(total > 0, total, 1)[..., None]  # total is 0 for padding only
    out = out[:, :, ::repeat].reshape(count, kv_heads, width, group, head_dim)
    return jnp.moveaxis(out, 1, 2).astype(q.dtype)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """weights [S, kv_heads, n, kv_tile], values [S, kv_tile, kv_heads, head_dim] -> [S, kv_heads, n, head_dim].

    XLA's CPU product sums each of the n rows in the same order whatever their number, as exactness needs, for head
    sizes that are multiples of 16; for others only when the summed axis of the values is the last one, which costs a
    transpose.
    """
    if values.shape[-1] % 16:
        values = jnp.transpose(values, (0, 2, 3, 1))
        return jnp.einsum("shnk,shdk->shnd", weights, values, preferred_element_type=jnp.float32)
    return jnp.einsum("shnk,skhd->shnd", weights, values, preferred_element_type=jnp.float32)
