"""Ragged paged attention on TPUs: noria's Pallas kernel behind the signature of the others.

The kernel writes the new keys and values to their pages itself, reads of each row the pages that its queries see and no
others, and takes the layer's offset into the cache, which it updates in place. See tpu_kernel.py for the work, and
tpu_lines.py for how the cache lies, which is another way than elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.ragged_paged_attention import tpu_cost
from noria.ops.ragged_paged_attention.cache import quantized, saturated
from noria.ops.ragged_paged_attention.tpu_lines import LANES, Lines
from noria.ops.ragged_paged_attention.tpu_sizes import VMEM_LIMIT, Sizes
from noria.ops.ragged_paged_attention.types import CACHE_DTYPES, KVCache, LayerAddress, RaggedBatch

_MAX_BLOCKS = 64 << 10  # of a sequence; the tables of two are in the memory of scalars
_DTYPES = ("float32", "bfloat16")  # of queries
_CACHE_DTYPES = ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
_MAX_HEAD_DIM = 256


def unsupported(head_dim: int, dtype: str, cache_dtype: str, block_size: int, num_blocks: int) -> str | None:
    """Why the kernel cannot be had; None when it can. num_blocks: of the longest sequence."""
    if dtype not in _DTYPES:
        return f"activations in {dtype}"
    if cache_dtype not in _CACHE_DTYPES:
        return f"a cache of {cache_dtype}"
    if head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim}, more than {_MAX_HEAD_DIM}"
    if block_size < 8 or block_size > LANES or block_size & (block_size - 1):
        return f"a block_size of {block_size}, which is not 8, 16, 32, 64 or 128"
    if num_blocks > _MAX_BLOCKS:
        return f"a max_model_len of {num_blocks:,} blocks, more than {_MAX_BLOCKS:,}"
    return None


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    batch: RaggedBatch,
    layer: LayerAddress,
    *,
    scale: float,
    soft_cap: float | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, KVCache]:
    """See api.py. cache: made by Lines.abstract. interpret: as of pallas_call; what it computes without a TPU.

    Padding tokens get their queries back as results.
    """
    kv_heads, head_dim = k.shape[1:]
    lines = Lines(kv_heads, head_dim, cache.dtype)
    group, width = q.shape[1] // kv_heads, batch.block_tables.shape[2]
    sizes = Sizes.choose(lines, group, cache.block_size, q.dtype.name, q.shape[0], width)
    rows = jnp.minimum(batch.token_rows, batch.seq_lens.shape[0] - 1)
    pages = batch.block_tables[layer.group, rows, batch.positions // cache.block_size]
    pages = layer.offset + jnp.where(batch.token_rows < batch.seq_lens.shape[0], pages, 0)  # [T]
    new, cache = _new_words(k, v, cache, pages, batch.positions, lines)
    out, data = _call(
        _arrange(q, lines),
        new,
        pages,
        cache,
        batch,
        layer,
        sizes=sizes,
        scale=scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    return _restore(out, q.shape, lines), dataclasses.replace(cache, data=data)


def _new_words(
    k: jax.Array, v: jax.Array, cache: KVCache, pages: jax.Array, positions: jax.Array, lines: Lines
) -> tuple[jax.Array, KVCache]:
    """The step's keys and values as lines [T, lines, 128], and the cache with their scales in it. pages: [T]."""
    if cache.scale is None:
        k, v = (saturated(values, CACHE_DTYPES[cache.dtype]) for values in (k, v))
    else:
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        size = cache.block_size
        line, lane = (place[positions % size] for place in lines.scale_place(size))  # [T, kv_heads, 2]
        place = (pages[:, None, None], jnp.zeros_like(line), line, lane)
        cache = dataclasses.replace(cache, scale=cache.scale.at[place].set(jnp.stack([k_scale, v_scale], axis=2)))
    unsigned = jnp.dtype(f"uint{32 // lines.packing}")
    return lines.pack(*(lax.bitcast_convert_type(values, unsigned) for values in (k, v))), cache


def _arrange(q: jax.Array, lines: Lines) -> jax.Array:
    """[T, heads, head_dim] -> [T, lane heads, query heads of each, width]. Of KV heads side by side, each has its
    queries where it lies, among zeros."""
    tokens, side = q.shape[0], lines.side
    q = q.reshape(tokens, lines.kv_heads, -1, lines.head_dim)
    narrow = LANES // side if side > 1 else lines.width
    pad = (0, lines.heads * side - lines.kv_heads), (0, 0), (0, narrow - lines.head_dim)
    q = jnp.pad(q, ((0, 0), *pad)).reshape(tokens, lines.heads, side, -1, narrow)
    if side > 1:
        own = jnp.eye(side, dtype=bool)[:, None, :, None]
        q = jnp.where(own, q[..., None, :], 0)
    return q.reshape(tokens, lines.heads, -1, lines.width)


def _restore(out: jax.Array, shape: tuple[int, ...], lines: Lines) -> jax.Array:
    """From the shape of _arrange to [T, heads, head_dim]."""
    side = lines.side
    if side > 1:
        out = out.reshape(shape[0], lines.heads, side, -1, side, LANES // side)
        out = jnp.stack([out[:, :, index, :, index] for index in range(side)], axis=2)
    out = out.reshape(shape[0], lines.heads * side, -1, out.shape[-1])
    return out[:, : lines.kv_heads, :, : lines.head_dim].reshape(shape)


def _call(
    q: jax.Array,
    new: jax.Array,
    pages: jax.Array,
    cache: KVCache,
    batch: RaggedBatch,
    layer: LayerAddress,
    *,
    sizes: Sizes,
    scale: float,
    soft_cap: float | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    # Here, because their import takes longer than all of noria's, and CPUs have no use for it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from noria.ops.ragged_paged_attention import tpu_kernel

    table = jnp.pad(batch.block_tables, ((0, 0), (0, 0), (0, -batch.block_tables.shape[2] % LANES)))
    table = table.reshape(*table.shape[:2], -1, LANES)
    kernel = tpu_kernel.Kernel(sizes, scale, soft_cap, bool(interpret))
    scales = [] if cache.scale is None else [cache.scale]
    scalars = (
        batch.query_start,
        batch.seq_lens,
        pages,
        jnp.stack([batch.distribution[2], layer.group, layer.offset, layer.window]),
    )

    def body(*refs: Any) -> None:
        first, rest = refs[:7], refs[8:]  # the eighth is the cache as an input, which is the output
        scale_ref, rest = (rest[0], rest[1:]) if scales else (None, rest)
        out_ref, cache_ref, *scratch = rest
        if not scales:
            scratch[3:3] = [None, None]
        kernel(tpu_kernel.Refs(*first, scale_ref, out_ref, cache_ref, *scratch))

    # Of a batch nothing is known but its shape.
    cost = tpu_cost.largest(sizes, q.shape[0], batch.seq_lens.shape[0], batch.block_tables.shape[2])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = (q, new, table, cache.data, *scales)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * len(operands),
            out_specs=[anywhere] * 2,
            scratch_shapes=_scratch(pltpu, sizes, cache, table.shape[2]),
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, cache.data)],
        input_output_aliases={len(scalars): 0, len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=cost.exponentials),
        interpret=interpret,
        name="noria_ragged_paged_attention",
    )
    return call(*scalars, *operands)


def _scratch(pltpu: Any, sizes: Sizes, cache: KVCache, table_lines: int) -> list[Any]:
    """In the order of tpu_kernel.Refs."""
    lines, dtype = sizes.lines, jnp.dtype(sizes.dtype)
    queries = (2, sizes.tile, lines.heads, sizes.heads, lines.width)
    rows = (lines.heads, sizes.tile * sizes.heads)
    scales = []
    if cache.scale is not None:
        count = cache.scale.shape[2]
        scales = [
            pltpu.VMEM((2, sizes.pages, count, LANES), jnp.float32),
            pltpu.VMEM((count * LANES, sizes.chunk), jnp.float32),
        ]
    return [
        pltpu.VMEM(queries, dtype),
        pltpu.VMEM(queries, dtype),
        pltpu.VMEM((2, sizes.chunk, lines.lines, LANES), jnp.int32),
        *scales,
        pltpu.VMEM((*rows, lines.width), dtype),
        pltpu.VMEM((2, lines.heads_in_line, sizes.chunk, lines.width), dtype),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, lines.width), jnp.float32),
        pltpu.SMEM((2, table_lines, LANES), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        *(pltpu.SemaphoreType.DMA((2,)) for _ in range(4)),
        pltpu.SemaphoreType.DMA,
    ]
