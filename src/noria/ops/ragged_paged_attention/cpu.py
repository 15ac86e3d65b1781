"""Ragged paged attention in C++ (native/attention): the cache is written in place, then read tile by tile.

Every sum over head_dim and over the KV sequence is made in one order that depends on the token's position alone: its
result has the same bits in any batch, chunk and number of threads, as a decode row or in a prefill.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from noria.ops.ragged_paged_attention.types import CACHE_DTYPES, KVCache, LayerAddress, RaggedBatch

_KEY_TILE, _QUERY_ROWS = 64, 96  # kKeyTile and kQueryRows of native/attention/types.h
_DTYPES = tuple(CACHE_DTYPES)  # CacheDtype there numbers them in this order


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
    path: str = "",
    threads: int = 0,
) -> tuple[jax.Array, KVCache]:
    """See api.py. q, k, v: float32 or bfloat16, all the same. The null block is not written, results of padding are 0.

    path: an instruction set of NativeLibrary.paths, "" for the best; threads: 0 for all of XLA's.
    """
    if v is None:
        raise TypeError("the native back end does not compute latent attention")
    arrays = [cache.data] if cache.scale is None else [cache.data, cache.scale]
    call = jax.ffi.ffi_call(
        "noria_ragged_paged_attention",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, *arrays)],
        input_output_aliases={9 + i: 1 + i for i in range(len(arrays))},
    )
    out, *arrays = call(
        *(q, k, v, batch.token_rows, batch.positions, batch.query_start, batch.seq_lens, batch.block_tables),
        jnp.stack([jnp.asarray(scalar, jnp.int32) for scalar in (layer.group, layer.offset, layer.window)]),
        *arrays,
        cache_dtype=np.int64(_DTYPES.index(cache.dtype)),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        path=path,
        threads=np.int64(threads),
    )
    return out, KVCache(arrays[0], arrays[1] if len(arrays) > 1 else None, cache.dtype)


def scratch_bytes(head_dim: int) -> int:
    """What each thread holds besides the arrays it is given, as scratch_floats in native/attention/types.h.

    The calling thread may hold 4 MiB more, of the sums of parts.
    """
    width = -(-head_dim // 16) * 16
    state = _QUERY_ROWS * (1 + 16 + width)
    per_query = 2 + width + _KEY_TILE
    return 4 * (2 * state + _QUERY_ROWS * per_query + (2 * _KEY_TILE + 16) * width)
