"""Matrix products with weights, and the two ends of a language model: embedding and vocabulary logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [T, in] times weight [out, in] -> [T, out], summed in float32; out_dtype defaults to that of x.

    [out, in] is how checkpoints store matrices. It is also the orientation in which XLA's CPU product of two or more
    rows sums each row in the same order whatever their number, which exactness rests on. One row alone would take
    another path, and in bfloat16 one 30 times slower: buckets never have fewer than two.
    """
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)


def embed(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """table [V, E], token_ids [T] -> [T, E]. Ids are checked at admission; a wild one is clipped, not wrapped."""
    return jnp.take(table, token_ids, axis=0, mode="clip")
