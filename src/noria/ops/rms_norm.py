"""Root mean square normalization (Zhang & Sennrich 2019), alone or as a part of another op."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util


@tree_util.register_dataclass
@dataclass(frozen=True)
class RmsNorm:
    """weight: [layers, size]. offset is added to the weight: Gemma stores weights around zero."""

    weight: Any
    epsilon: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})

    def __call__(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """x [..., size] normalized over its last axis, in float32."""
        wide = x.astype(jnp.float32)
        squares = wide * wide
        mean = lax.platform_dependent(squares, cpu=_mean_by_product, default=partial(jnp.mean, axis=-1, keepdims=True))
        weight = lax.dynamic_index_in_dim(self.weight, layer, keepdims=False).astype(jnp.float32)
        return wide * lax.rsqrt(mean + self.epsilon) * (weight + self.offset)


def _mean_by_product(x: jax.Array) -> jax.Array:
    """The mean over the last axis, as a column.

    XLA's CPU code sums the rows of a plain reduction, and of a product with a vector, in an order that depends on how
    many there are; a product with a matrix in this orientation takes every row alike (see linear).
    """
    size = x.shape[-1]
    sums = lax.dot_general(x.reshape(-1, size), jnp.ones((2, size), x.dtype), (((1,), (1,)), ((), ())))
    return sums[:, :1].reshape(*x.shape[:-1], 1) / size
