"""The op of experts, spelled out: every expert computes every token, and shares of zero do the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.linear.reference import linear


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
    each, total = matrices.one_by_one(), jnp.zeros(x.shape, jnp.float32)
    for expert in range(num_experts):
        index = layer * num_experts + expert
        (inner,) = linear(x, (each.gate, each.up), index, rows, activation=activation)
        (y,) = linear(inner, (each.down,), index, rows, out_dtype=jnp.dtype(jnp.float32))
        share = jnp.sum(jnp.where(choice.ids == first + expert, choice.shares, 0), axis=1)
        total = total + share[:, None] * y
    return total
