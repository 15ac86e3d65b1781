"""The op of experts as ragged products: rows sorted by expert against all matrices of a layer (Gale et al. 2023).

For dense weights on accelerators.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.experts.sort import by_expert, combine
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.linear.reference import gate
from noria.ops.linear.types import DenseWeight, Weight

_ROWS_OF_EXPERTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class Product(Protocol):
    """x: [slots, in], sorted by group. matrices: [matrices, out, in], in the dtype of x or int8 with scale, float32
    [matrices, out]. counts: [groups], the rows of each group; those of group g are multiplied with the transpose of
    matrices[first + g]. Returns float32 [slots, out], of no meaning in rows of no group.
    """

    def __call__(
        self, x: jax.Array, matrices: jax.Array, counts: jax.Array, first: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array: ...


def ragged_dot(
    x: jax.Array, matrices: jax.Array, counts: jax.Array, first: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """The Product that JAX has; the matrices of a layer are copied."""
    groups = len(counts)
    some = lax.dynamic_slice_in_dim(matrices, first, groups).astype(x.dtype)
    y = lax.ragged_dot_general(x, some, counts, _ROWS_OF_EXPERTS, preferred_element_type=jnp.dtype(jnp.float32))
    if scale is None:
        return y
    group = jnp.sum(jnp.arange(len(x))[:, None] >= jnp.cumsum(counts), axis=1)  # of each row
    return y * jnp.take(lax.dynamic_slice_in_dim(scale, first, groups), group, axis=0, mode="clip")


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
    product: Product = ragged_dot,
) -> jax.Array:
    """See api.py."""
    order, each = by_expert(choice, rows, num_experts, first), matrices.one_by_one()

    def times(x: jax.Array, weight: Weight) -> jax.Array:
        if not isinstance(weight, DenseWeight):
            raise TypeError("packed weights need the tiled op")
        return product(x, weight.data, order.counts, layer * num_experts, weight.scale)

    slots = jnp.take(x, order.tokens, axis=0)
    (inner,) = gate([times(slots, each.gate), times(slots, each.up)], activation)
    return combine(times(inner.astype(x.dtype), each.down), order, choice.shares)
