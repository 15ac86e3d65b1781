"""The op of experts as ragged products: rows sorted by expert against all matrices of a layer (Gale et al. 2023).

For dense weights on accelerators.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.experts.sort import Sorted, by_expert, combine
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.linear.reference import gate
from noria.ops.linear.types import DenseWeight, Weight

_BY_ROWS_OF_EXPERTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


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
) -> jax.Array:
    """See api.py."""
    order = by_expert(choice, rows, num_experts, first)
    x_sorted = jnp.take(x, order.tokens, axis=0)
    pair = [_product(x_sorted, weight, layer, order) for weight in (matrices.gate, matrices.up)]
    (inner,) = gate(pair, activation)
    return combine(_product(inner.astype(x.dtype), matrices.down, layer, order), order, choice.shares)


def _product(x: jax.Array, weight: Weight, layer: jax.Array, order: Sorted) -> jax.Array:
    """x [slots, in] -> float32 [slots, out], with a meaning where an expert computes."""
    if not isinstance(weight, DenseWeight):
        raise TypeError("packed weights need the tiled op")
    matrix = lax.dynamic_index_in_dim(weight.data, layer, keepdims=False).astype(x.dtype)  # [experts, out, in]
    y = lax.ragged_dot_general(
        x, matrix, order.counts, _BY_ROWS_OF_EXPERTS, preferred_element_type=jnp.dtype(jnp.float32)
    )
    if weight.scale is None:
        return y
    scale = lax.dynamic_index_in_dim(weight.scale, layer, keepdims=False)  # [experts, out]
    return y * jnp.take(scale, order.experts, axis=0, mode="clip")
