"""Root mean square normalization (Zhang & Sennrich 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Over the last axis, computed in float32. offset is added to the weight: Gemma stores weights around zero."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
