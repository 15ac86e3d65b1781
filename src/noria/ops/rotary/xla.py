"""The rotary op in plain XLA: the contract, and what every device has."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from noria.ops.rms_norm import RmsNorm


def rotary(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rope: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    *,
    q_norm: RmsNorm | None = None,
    k_norm: RmsNorm | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    turn = lambda x, norm: _rotate(norm(x, layer) if norm else x, cos[rope], sin[rope]).astype(x.dtype)
    return turn(q, q_norm), turn(k, k_norm)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, heads, head_dim]; cos, sin [T, head_dim / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
