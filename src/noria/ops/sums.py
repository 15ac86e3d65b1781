"""Sums and maxima over the last axis that take every row alike, whatever the number of rows."""

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


def row_max(x: jax.Array) -> jax.Array:
    """x [..., size] -> its largest values over the last axis, as a column [..., 1].

    The maximum itself is the same anyhow. But XLA's CPU code computes what uses a plain reduction together with it, and
    from 4,096 values on in another way: exp(x - maximum) then has other last bits.
    """
    return lax.platform_dependent(x, cpu=lambda x: lax.top_k(x, 1)[0], default=partial(jnp.max, axis=-1, keepdims=True))


def _by_product(x: jax.Array) -> jax.Array:
    size = x.shape[-1]
    sums = lax.dot_general(x.reshape(-1, size), jnp.ones((2, size), x.dtype), (((1,), (1,)), ((), ())))
    return sums[:, :1].reshape(*x.shape[:-1], 1)
