"""The linear op in plain XLA, for dense weights on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.linear.reference import add_residual, gate, largest, normalized
from noria.ops.linear.types import DenseWeight, PackedWeight, Weight
from noria.ops.rms_norm import RmsNorm

Product = Callable[[jax.Array, DenseWeight, jax.Array], jax.Array]


def product(x: jax.Array, weight: DenseWeight, layer: jax.Array) -> jax.Array:
    """x [T, K] times the layer's matrix transposed, float32 [T, N].

    [out, in] is the orientation in which XLA's CPU product of two or more rows sums each row in the same order
    whatever their number. One row alone would take another path, and in bfloat16 one 30 times slower: callers on the
    CPU pass two rows or more.
    """
    matrix = lax.dynamic_index_in_dim(weight.data, layer, keepdims=False)
    if weight.scale is not None:
        matrix = matrix.astype(x.dtype)
    y = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y if weight.scale is None else y * lax.dynamic_index_in_dim(weight.scale, layer, keepdims=False)


def linear(
    x: jax.Array,
    weights: Sequence[Weight],
    layer: jax.Array,
    rows: jax.Array,
    *,
    norm: RmsNorm | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    post_norm: RmsNorm | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    quantize_x: bool = False,  # dense weights have no codes that it would speed up
    product: Product = product,
) -> tuple[jax.Array, ...]:
    """See api.py. product: with what matrices are multiplied."""
    x, results = normalized(x, norm, layer), []
    for weight, bias in zip(weights, biases or [None] * len(weights)):
        y = product(x, _dense(weight), layer)
        y = y if bias is None else y + bias[layer].astype(jnp.float32)
        # What lies in memory before it is gated is no wider than x is.
        results.append(y if activation is None else y.astype(x.dtype).astype(jnp.float32))
    results = add_residual(gate(results, activation), post_norm, layer, residual)
    return tuple(y.astype(out_dtype or x.dtype) for y in results)


def argmax(
    x: jax.Array,
    weight: Weight,
    rows: jax.Array,
    *,
    num_choices: int,
    norm: RmsNorm | None = None,
    quantize_x: bool = False,
    product: Product = product,
) -> jax.Array:
    """See api.py, and linear."""
    (logits,) = linear(x, (weight,), jnp.int32(0), rows, norm=norm, out_dtype=jnp.dtype(jnp.float32), product=product)
    return largest(logits, num_choices)


def embed(table: Weight, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """See api.py."""
    weight = _dense(table)
    rows = jnp.take(weight.data[0], token_ids, axis=0, mode="clip")
    if weight.scale is not None:
        rows = rows * jnp.take(weight.scale[0], token_ids, mode="clip")[:, None]
    return rows.astype(dtype)


def _dense(weight: Weight) -> DenseWeight:
    if isinstance(weight, PackedWeight):
        raise TypeError("packed weights need the native back end")
    return weight
