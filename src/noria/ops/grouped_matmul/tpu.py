"""Grouped products on TPUs, in Pallas: the idea is MegaBlocks' (Gale et al. 2023, "MegaBlocks: Efficient Sparse
Training with Mixture-of-Experts").

Rows are worked on in tiles. A *visit* is a tile and a group that has rows in it; a tile that groups share is visited
once for each, and what a visit does not own of the result is left as it is. Visits of a group follow each other, and a
block of a matrix is as deep as the matrix: it is copied to fast memory once, and an 8-bit one is converted once, for
all rows of its group. Groups without rows are not visited, so their matrices are not read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.grouped_matmul import reference

_LANES = 128
_MATRIX_BYTES = 40 << 20  # of fast memory, for a block of a matrix in use, the next one, and what it is converted to
_ROW_BYTES = 12 << 20  # for a tile of rows and the next one, and for results
_MAX_TILE = 512
VMEM_LIMIT = 56 << 20  # see ragged_paged_attention/tpu_sizes.py


class Visits(NamedTuple):
    """Of all row tiles, in order. starts, ends: the rows of each group; count: [1]. Visits that do not exist repeat the
    last one, and so copy nothing."""

    group: jax.Array
    tile: jax.Array
    starts: jax.Array
    ends: jax.Array
    count: jax.Array
    first: jax.Array  # [1]: matrix of the first group


class Sizes(NamedTuple):
    rows: int  # of a tile
    columns: int  # outputs of a block of a matrix


def unsupported(n: int, k: int, itemsize: int, matrix_itemsize: int) -> str | None:
    """Why the kernel cannot be had for matrices [n, k]; None when it can. itemsize: of rows."""
    if n % _LANES or k % _LANES:
        return f"matrices of {n} by {k}, which are no multiples of {_LANES}"
    if _columns(n, k, itemsize, matrix_itemsize) is None:
        return f"matrices of {k} inputs, too many for fast memory"
    return None


def choose_sizes(m: int, n: int, k: int, groups: int, itemsize: int, matrix_itemsize: int) -> Sizes:
    """itemsize: of rows and of what is multiplied. Tiles of about the rows of a group: smaller ones would load the MXU
    with the same block again, larger ones would multiply more rows that belong to other groups."""
    columns = _columns(n, k, itemsize, matrix_itemsize)
    assert columns is not None, "unsupported comes first"
    rows = _LANES
    while rows < min(_MAX_TILE, m // groups):
        rows *= 2
    while rows > 8 and (2 * rows * (k * itemsize + columns * 4) > _ROW_BYTES or rows // 2 >= m):
        rows //= 2
    return Sizes(max(rows, 32 // itemsize), columns)


def _columns(n: int, k: int, itemsize: int, matrix_itemsize: int) -> int | None:
    """The largest that divides n and fits."""
    converted = itemsize if matrix_itemsize != itemsize else 0
    fitting = [
        size
        for size in range(_LANES, n + 1, _LANES)
        if n % size == 0 and size * k * (2 * matrix_itemsize + converted) <= _MATRIX_BYTES
    ]
    return max(fitting, default=None)


def plan_visits(counts: jax.Array, first: jax.Array, rows: int, tile: int) -> Visits:
    """rows: all that there are."""
    ends = jnp.cumsum(counts)
    starts = ends - counts
    first_tile = starts // tile
    number = jnp.where(counts > 0, (ends - 1) // tile - first_tile + 1, 0)  # visits of each group
    until = jnp.cumsum(number)
    most = -(-rows // tile) + counts.shape[0] - 1
    visit = jnp.minimum(jnp.arange(most), jnp.maximum(until[-1] - 1, 0))
    group = jnp.minimum(jnp.sum(visit[:, None] >= until, axis=1), counts.shape[0] - 1)
    tiles = jnp.minimum(first_tile[group] + visit - (until - number)[group], -(-rows // tile) - 1)
    as_scalars = lambda array: jnp.atleast_1d(array).astype(jnp.int32)
    return Visits(*map(as_scalars, (group, tiles, starts, ends, until[-1], first)))


def grouped_matmul(
    x: jax.Array,
    matrices: jax.Array,
    counts: jax.Array,
    first: jax.Array,
    scale: jax.Array | None = None,
    *,
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py; where unsupported has a reason, XLA's. sizes: of tests; interpret: as of pallas_call."""
    _, out, inside = matrices.shape
    if unsupported(out, inside, x.dtype.itemsize, matrices.dtype.itemsize) is not None:
        return reference.grouped_matmul(x, matrices, counts, first, scale)
    # Here, because their import takes longer than all of noria's, and CPUs have no use for it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (m, k), n, groups = x.shape, matrices.shape[1], counts.shape[0]
    sizes = sizes or choose_sizes(m, n, k, groups, x.dtype.itemsize, matrices.dtype.itemsize)
    visits = plan_visits(counts, first, m, sizes.rows)
    is_converted = matrices.dtype != x.dtype

    scales = [] if scale is None else [scale[:, None]]  # [matrices, 1, n]
    matrix_at = lambda column, visit, group, tile, starts, ends, count, first: (first[0] + group[visit], column, 0)
    scale_at = lambda column, visit, group, tile, starts, ends, count, first: (first[0] + group[visit], 0, column)
    call = pl.pallas_call(
        partial(_kernel, sizes=sizes, has_scale=scale is not None, is_converted=is_converted),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(n // sizes.columns, visits.group.shape[0]),
            in_specs=[
                pl.BlockSpec((sizes.rows, k), lambda column, visit, group, tile, *_: (tile[visit], 0)),
                pl.BlockSpec((None, sizes.columns, k), matrix_at),
                *[pl.BlockSpec((None, 1, sizes.columns), scale_at) for _ in scales],
            ],
            out_specs=pl.BlockSpec(
                (sizes.rows, sizes.columns), lambda column, visit, group, tile, *_: (tile[visit], column)
            ),
            scratch_shapes=[pltpu.VMEM((sizes.columns, k), x.dtype)] if is_converted else [],
        ),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(**cost(m, n, k, groups, x.dtype.itemsize, matrices.dtype.itemsize, sizes)),
        interpret=interpret,
        name="noria_grouped_matmul",
    )
    return call(*visits, x, matrices, *scales)


def least_bytes(m: int, n: int, k: int, groups: int, itemsize: int, matrix_itemsize: int) -> int:
    """That any product of this kind must read and write."""
    return m * k * itemsize + groups * n * k * matrix_itemsize + m * n * 4


def cost(m: int, n: int, k: int, groups: int, itemsize: int, matrix_itemsize: int, sizes: Sizes) -> dict[str, int]:
    """What is declared to the compiler, of groups that all have rows: rows are read for each block of a matrix."""
    blocks = n // sizes.columns
    return {
        "flops": 2 * m * n * k,
        "bytes_accessed": blocks * m * k * itemsize + groups * n * k * matrix_itemsize + m * n * 4,
        "transcendentals": 0,
    }


def _kernel(*refs: Any, sizes: Sizes, has_scale: bool, is_converted: bool) -> None:
    from jax.experimental import pallas as pl

    visits, (x, matrix), rest = Visits(*refs[:6]), refs[6:8], list(refs[8:])
    scale = rest.pop(0) if has_scale else None
    out = rest.pop(0)
    visit = pl.program_id(1)
    group, tile = visits.group[visit], visits.tile[visit]
    before = jnp.maximum(visit - 1, 0)
    is_first = visit == 0

    if is_converted:
        (converted,) = rest

        @pl.when(is_first | (visits.group[before] != group))
        def _() -> None:
            converted[...] = matrix[...].astype(converted.dtype)

    @pl.when(visit < visits.count[0])
    def _() -> None:
        rows = x[...]
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        right = converted[...] if is_converted else matrix[...]
        y = lax.dot_general(rows, right, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.float32)
        if scale is not None:
            y = y * scale[...]
        row = tile * sizes.rows + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        own = (row >= visits.starts[group]) & (row < visits.ends[group])
        begins = is_first | (visits.tile[before] != tile)
        out[...] = jnp.where(own, y, jnp.where(begins, 0.0, out[...]))
