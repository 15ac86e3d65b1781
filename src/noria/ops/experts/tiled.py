"""The op of experts as a loop over tiles: rows of one expert, as many as there are, up to the size of a tile.

For CPUs. The products are those of the linear op, which takes every row alike, whatever stands in the others: so a
token's result does not depend on who chose the same expert. Experts that nobody chose are never looked at, and packed
weights stay packed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.experts.sort import by_expert, combine
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.linear.api import Linear

_MIN_TILE, _MAX_TILE = 8, 128


def experts(
    x: jax.Array,
    matrices: ExpertMatrices,
    layer: jax.Array,
    rows: jax.Array,
    choice: Choice,
    *,
    num_experts: int,
    activation: str,
    linear: Linear,
    first: jax.Array | int = 0,
) -> jax.Array:
    """See api.py. linear: the linear op, which takes the matrices."""
    order = by_expert(choice, rows, num_experts, first)
    tile = _tile_rows(choice.ids.size, num_experts)
    tiles = -(-order.counts // tile)
    ends = jnp.cumsum(tiles)
    each, slots = matrices.one_by_one(), choice.ids.size
    # A tile may reach beyond the slots; what it leaves behind its own rows is overwritten by the tiles that follow.
    tokens = jnp.pad(order.tokens, (0, tile))

    def compute(number: jax.Array, results: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= number, dtype=jnp.int32)
        begin = (number - (ends - tiles)[expert]) * tile
        start, count = order.starts[expert] + begin, jnp.minimum(order.counts[expert] - begin, tile)
        index = layer * num_experts + expert
        part = jnp.take(x, lax.dynamic_slice_in_dim(tokens, start, tile), axis=0, mode="clip")
        (inner,) = linear(part, (each.gate, each.up), index, count, activation=activation)
        (y,) = linear(inner, (each.down,), index, count, out_dtype=jnp.dtype(jnp.float32))
        return lax.dynamic_update_slice_in_dim(results, y, start, axis=0)

    results = lax.fori_loop(0, ends[-1], compute, jnp.zeros((slots + tile, x.shape[1]), jnp.float32))
    return combine(results, order, choice.shares)


def _tile_rows(slots: int, num_experts: int) -> int:
    """Twice the average that an expert gets, so that most need one tile."""
    size = _MIN_TILE
    while size < _MAX_TILE and size * num_experts < 2 * slots:
        size *= 2
    return size
