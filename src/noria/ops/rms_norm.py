"""Root mean square normalization (Zhang & Sennrich 2019), alone or as a part of another op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.ops.sums import row_sums


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
        mean = row_sums(wide * wide) / x.shape[-1]
        weight = lax.dynamic_index_in_dim(self.weight, layer, keepdims=False).astype(jnp.float32)
        return wide * lax.rsqrt(mean + self.epsilon) * (weight + self.offset)
