"""The linear op on TPUs with Pallas: 8-bit matrices, integers or floats, in the kernel of grouped products.

The matrix of the layer is found by its number, so that no slice is made, read once, and converted in fast memory once
for all rows. Everything else is XLA's: other weights, and what surrounds the products. XLA's own product of 8-bit
integers reads them once, too, and can be split over devices, so this is for who asks for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from noria.ops.grouped_matmul import tpu as grouped
from noria.ops.linear import xla
from noria.ops.linear.types import DenseWeight

_MOST = 1.25  # of the bytes that no product can avoid


def _product(x: jax.Array, weight: DenseWeight, layer: jax.Array, *, interpret: Any = False) -> jax.Array:
    """See xla.product."""
    if weight.scale is None or not _fits(x, weight):
        return xla.product(x, weight, layer)
    counts = jnp.full(1, x.shape[0], jnp.int32)
    return grouped.grouped_matmul(x, weight.data, counts, layer, weight.scale, interpret=interpret)


def _fits(x: jax.Array, weight: DenseWeight) -> bool:
    """Not where many rows would be read again for each block of a matrix."""
    matrix = weight.out_features, weight.in_features
    itemsizes = x.dtype.itemsize, weight.data.dtype.itemsize
    if grouped.unsupported(*matrix, *itemsizes) is not None:
        return False
    shape = (x.shape[0], *matrix, 1, *itemsizes)
    found = grouped.cost(*shape, grouped.choose_sizes(*shape))["bytes_accessed"]
    return found <= _MOST * grouped.least_bytes(*shape)


linear = partial(xla.linear, product=_product)
argmax = partial(xla.argmax, product=_product)
