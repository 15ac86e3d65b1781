"""Ragged paged attention on TPUs: noria's Pallas kernel behind the signature of the others.

The kernel writes the new keys and values to their pages itself, reads of each row the pages that its queries see and no
others, and takes the layer's offset into the cache, which it updates in place. See tpu_kernel.py for the work, and
tpu_lines.py for how the cache lies, which is another way than elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_MAX_LATENT = 1024  # where the values are the keys
_MAX_INT8_HEADS = 64  # whose scales fill a line


def unsupported(
    kv_heads: int, head_dim: int, dtype: str, cache_dtype: str, block_size: int, num_blocks: int, planes: int = 2
) -> str | None:
    """Why the kernel cannot be had; None when it can. kv_heads: of one device; num_blocks: of the longest sequence;
    planes: of the cache."""
    if dtype not in _DTYPES:
        return f"activations in {dtype}"
    if cache_dtype not in _CACHE_DTYPES:
        return f"a cache of {cache_dtype}"
    widest = _MAX_HEAD_DIM if planes == 2 else _MAX_LATENT
    if head_dim > widest:
        return f"heads of {head_dim}, more than {widest}"
    if block_size < 8 or block_size > LANES or block_size & (block_size - 1):
        return f"a block_size of {block_size}, which is not 8, 16, 32, 64 or 128"
    if cache_dtype == "int8" and kv_heads > _MAX_INT8_HEADS:
        return f"{kv_heads} KV heads in int8, more than {_MAX_INT8_HEADS}"
    if num_blocks > _MAX_BLOCKS:
        return f"a max_model_len of {num_blocks:,} blocks, more than {_MAX_BLOCKS:,}"
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
    interpret: Any = False,
) -> tuple[jax.Array, KVCache]:
    """See api.py. cache: made by Lines.abstract. interpret: as of pallas_call; what it computes without a TPU.

    Padding tokens get their queries back as results.
    """
    kv_heads, head_dim = k.shape[1:]
    planes = (k,) if v is None else (k, v)
    lines = Lines(kv_heads, head_dim, cache.dtype, len(planes))
    group, width = q.shape[1] // kv_heads, batch.block_tables.shape[2]
    sizes = Sizes.choose(lines, group, cache.block_size, q.dtype.name, q.shape[0], width)
    rows = jnp.minimum(batch.token_rows, batch.seq_lens.shape[0] - 1)
    pages = batch.block_tables[layer.group, rows, batch.positions // cache.block_size]
    pages = layer.offset + jnp.where(batch.token_rows < batch.seq_lens.shape[0], pages, 0)  # [T]
    new, new_scale = _new_words(planes, lines)
    if cache.scale is not None:
        assert new_scale is not None
        new_scale = _scale_lines(new_scale, cache.scale, pages, batch, lines, cache.block_size)
    out, cache = _call(
        _arrange(q, lines),
        (new, new_scale),
        pages,
        cache,
        batch,
        layer,
        sizes=sizes,
        scale=scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    return _restore(out, q.shape, lines), cache


def _new_words(planes: Sequence[jax.Array], lines: Lines) -> tuple[jax.Array, jax.Array | None]:
    """The step's keys and values as lines [T, lines, 128], and for int8 their scales [T, kv_heads, planes]."""
    scale = None
    if lines.dtype == "int8":
        planes, scales = zip(*map(quantized, planes))
        scale = jnp.stack(scales, axis=2)
    else:
        planes = [saturated(values, CACHE_DTYPES[lines.dtype]) for values in planes]
    unsigned = jnp.dtype(f"uint{32 // lines.packing}")
    return lines.pack(*(lax.bitcast_convert_type(values, unsigned) for values in planes)), scale


def _scale_lines(
    new: jax.Array, old: jax.Array, pages: jax.Array, batch: RaggedBatch, lines: Lines, block_size: int
) -> jax.Array:
    """For each token the line of its scales as it is after the step: with those of its neighbours in the batch, and
    for others what the cache has.

    new: [T, kv_heads, planes]; old: the cache's scales; pages: [T]. -> float32 [T, 1, 128].
    """
    tokens, together, width = new.shape[0], lines.scale_tokens(block_size), lines.scale_width
    words = jnp.pad(new, ((0, 0), (0, width // lines.planes - lines.kv_heads), (0, 0))).reshape(tokens, width)
    slot = (batch.positions % together)[:, None]
    owner = jnp.arange(LANES)[None] // width  # of each lane
    spread = jnp.where(owner == slot, jnp.tile(words, LANES // width), 0)  # [T, 128]: a token's scales at their place
    line = batch.positions // together
    # Neighbours are so near that shifting is less work than gathering.
    shift = lambda array, by: lax.slice_in_dim(
        jnp.pad(array, ((together, together), *[(0, 0)] * (array.ndim - 1)), constant_values=-1),
        *(together + by, together + by + tokens),
    )
    fresh, is_new = spread, owner == slot
    for by in [step for step in range(1 - together, together) if step]:
        same = ((shift(batch.token_rows, by) == batch.token_rows) & (shift(line, by) == line))[:, None]
        its = same & (owner == shift(slot, by))
        fresh, is_new = jnp.where(its, shift(spread, by), fresh), is_new | its
    kept = old[pages, 0, batch.positions % block_size // together]
    return jnp.where(is_new, fresh, kept)[:, None]


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
    new: tuple[jax.Array, jax.Array | None],
    pages: jax.Array,
    cache: KVCache,
    batch: RaggedBatch,
    layer: LayerAddress,
    *,
    sizes: Sizes,
    scale: float,
    soft_cap: float | None,
    interpret: Any,
) -> tuple[jax.Array, KVCache]:
    # Here, because their import takes longer than all of noria's, and CPUs have no use for it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from noria.ops.ragged_paged_attention.tpu_attend import Attend
    from noria.ops.ragged_paged_attention.tpu_copies import Copies
    from noria.ops.ragged_paged_attention.tpu_kernel import Kernel
    from noria.ops.ragged_paged_attention.tpu_refs import HAS_NONE, HAS_SCALES, Refs

    table = _table_lines(batch.block_tables)
    place = jnp.stack([batch.distribution[2], layer.group, layer.offset, layer.window])
    scalars = (batch.query_start, batch.seq_lens, pages, place)
    given = [array for array in (*new, table) if array is not None]
    updated = [array for array in (q, cache.data, cache.scale) if array is not None]
    kernel = Kernel(Copies(sizes), Attend(sizes, scale, soft_cap, bool(interpret)))

    def body(*refs: Any) -> None:
        first, rest = refs[: len(scalars)], refs[len(scalars) :]
        inputs, rest = rest[: len(given)], rest[len(given) :]
        before, after, scratch = rest[0], rest[len(updated) : 2 * len(updated)], rest[2 * len(updated) :]
        names = HAS_SCALES if cache.scale is not None else HAS_NONE
        kernel(Refs(**dict(zip(names, (*first, *inputs, before, *after, *scratch), strict=True))))

    # Of a batch nothing is known but its shape.
    cost = tpu_cost.largest(sizes, q.shape[0], batch.seq_lens.shape[0], batch.block_tables.shape[2])
    anywhere, in_hbm = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)
    places = [anywhere, *[in_hbm] * (len(updated) - 1)]  # queries and results may be in fast memory already
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * len(given) + places,
            out_specs=places,
            scratch_shapes=_scratch(pltpu, sizes, cache, table.shape[2]),
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated],
        input_output_aliases={len(scalars) + len(given) + index: index for index in range(len(updated))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=cost.exponentials),
        interpret=interpret,
        name="noria_ragged_paged_attention",
    )
    out, *arrays = call(*scalars, *given, *updated)
    return out, KVCache(arrays[0], arrays[1] if len(arrays) > 1 else None, cache.dtype)


def _table_lines(tables: jax.Array) -> jax.Array:
    """[G, R, B] -> [G, R, B / 128 rounded up, 128]. It does not depend on the layer, so a loop makes it once."""
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % LANES)))
    return tables.reshape(*tables.shape[:2], -1, LANES)


def _scratch(pltpu: Any, sizes: Sizes, cache: KVCache, table_lines: int) -> list[Any]:
    """In the order of tpu_refs' names."""
    lines, dtype = sizes.lines, jnp.dtype(sizes.dtype)
    queries = (2, sizes.tile, lines.heads, sizes.heads, lines.width)
    rows = (lines.heads, sizes.tile * sizes.heads)
    scales = []
    if cache.scale is not None:
        count, width = cache.scale.shape[2], lines.scale_width
        scales = [
            pltpu.VMEM((2, sizes.pages, count, LANES), jnp.float32),
            pltpu.VMEM((sizes.chunk // LANES, count * LANES // width, width, LANES), jnp.float32),
        ]
    return [
        pltpu.VMEM(queries, dtype),
        pltpu.VMEM(queries, dtype),
        pltpu.VMEM((2, sizes.chunk, lines.lines, LANES), jnp.int32),
        *scales,
        pltpu.VMEM((*rows, lines.width), dtype),
        pltpu.VMEM((lines.planes, lines.heads_in_line, sizes.chunk, lines.width), dtype),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, lines.width), jnp.float32),
        pltpu.SMEM((2, table_lines, LANES), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        *(pltpu.SemaphoreType.DMA((2,)) for _ in range(4)),
        *(pltpu.SemaphoreType.DMA for _ in range(2)),
    ]
