"""Grouped products by XLA, whose ragged product they are: the contract of the kernel, and what others use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(
    x: jax.Array, matrices: jax.Array, counts: jax.Array, first: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """See api.py."""
    groups = counts.shape[0]
    own = lax.dynamic_slice_in_dim(matrices, first, groups).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.ragged_dot_general(
        x, own, counts, _BY_GROUP, precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
    )
    if scale is None:
        return y
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= jnp.cumsum(counts), axis=1)
    return y * jnp.take(lax.dynamic_slice_in_dim(scale, first, groups), group, axis=0, mode="clip")
