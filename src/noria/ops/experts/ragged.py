"""The op of experts as ragged products: rows sorted by expert against all matrices of a layer (Gale et al. 2023).

For dense weights on accelerators.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from noria.ops.experts.sort import Sorted, by_expert, combine
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.grouped_matmul import reference
from noria.ops.grouped_matmul.api import GroupedMatmul
from noria.ops.linear.reference import gate
from noria.ops.linear.types import DenseWeight, Weight


def experts(
    x: jax.Array,
    matrices: ExpertMatrices,
    layer: jax.Array,
    rows: jax.Array,
    choice: Choice,
    *,
    num_experts: int,
    activation: str,
    first: jax.Array | int = 0,
    multiply: GroupedMatmul = reference.grouped_matmul,
) -> jax.Array:
    """See api.py. multiply: rows sorted by expert with the matrices of their experts."""
    order = by_expert(choice, rows, num_experts, first)
    x_sorted = jnp.take(x, order.tokens, axis=0)
    pair = [_product(x_sorted, weight, layer, order, multiply) for weight in (matrices.gate, matrices.up)]
    (inner,) = gate(pair, activation)
    y = _product(inner.astype(x.dtype), matrices.down, layer, order, multiply)
    return combine(y, order, choice.shares)


def _product(x: jax.Array, weight: Weight, layer: jax.Array, order: Sorted, multiply: GroupedMatmul) -> jax.Array:
    """x [slots, in] -> float32 [slots, out], with a meaning where an expert computes."""
    if not isinstance(weight, DenseWeight):
        raise TypeError("packed weights need the tiled op")
    experts, *matrix = weight.data.shape[1:]
    every = weight.data.reshape(-1, *matrix)
    scale = None if weight.scale is None else weight.scale.reshape(-1, matrix[0])
    return multiply(x, every, order.counts, layer * experts, scale)
