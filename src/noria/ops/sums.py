"""Sums over the last axis whose order does not depend on the number of rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def row_sums(x: jax.Array) -> jax.Array:
    """x [..., size] -> its sums over the last axis, as a column [..., 1].

    XLA's CPU code sums the rows of a plain reduction, and of a product with a vector, in an order that depends on how
    many there are; a product with a matrix in this orientation takes every row alike (see linear).
    """
    return lax.platform_dependent(x, cpu=_by_product, default=partial(jnp.sum, axis=-1, keepdims=True))


def _by_product(x: jax.Array) -> jax.Array:
    size = x.shape[-1]
    sums = lax.dot_general(x.reshape(-1, size), jnp.ones((2, size), x.dtype), (((1,), (1,)), ((), ())))
    return sums[:, :1].reshape(*x.shape[:-1], 1)
