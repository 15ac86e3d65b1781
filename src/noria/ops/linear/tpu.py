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

_MAX_ROWS = 512  # with more, reading them again for each block of a matrix costs more than the matrix


def _product(x: jax.Array, weight: DenseWeight, layer: jax.Array, *, interpret: Any = False) -> jax.Array:
    """See xla.product."""
    fits = grouped.unsupported(weight.out_features, weight.in_features) is None
    if weight.scale is None or not fits or x.shape[0] > _MAX_ROWS:
        return xla.product(x, weight, layer)
    counts = jnp.full(1, x.shape[0], jnp.int32)
    return grouped.grouped_matmul(x, weight.data, counts, layer, weight.scale, interpret=interpret)


linear = partial(xla.linear, product=_product)
argmax = partial(xla.argmax, product=_product)
