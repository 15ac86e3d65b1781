"""Root mean square normalization (Zhang & Sennrich 2019)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Over the last axis, computed in float32. offset is added to the weight: Gemma stores weights around zero."""
    wide = x.astype(jnp.float32)
    mean = lax.platform_dependent(wide * wide, cpu=_mean_by_product, default=partial(jnp.mean, axis=-1, keepdims=True))
    wide = wide * lax.rsqrt(mean + epsilon)
    return (wide * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def _mean_by_product(x: jax.Array) -> jax.Array:
    """The mean over the last axis, as a column.

    XLA's CPU code sums the rows of a plain reduction, and of a product with a vector, in an order that depends on how
    many there are; a product with a matrix in this orientation takes every row alike (see linear).
    """
    size = x.shape[-1]
    sums = lax.dot_general(x.reshape(-1, size), jnp.ones((2, size), x.dtype), (((1,), (1,)), ((), ())))
    return sums[:, :1].reshape(*x.shape[:-1], 1) / size
