"""Rotary position embedding of queries and keys (Su et al. 2021), and the norm of each head that may precede it."""

from __future__ import annotations

from typing import Protocol

import jax

from noria.ops.rms_norm import RmsNorm
from noria.ops.rotary import cpu, xla

__all__ = ["BACKENDS", "Rotary", "choose"]


class Rotary(Protocol):
    """The signature that every implementation has.

    q: [T, heads, head_dim], k: [T, kv_heads, head_dim], float32 or bfloat16; cos, sin: f32 [ropes, T, head_dim / 2],
    of which those of index rope are used. layer: of the norms, whose size is head_dim. rows: int32 scalar, the number
    of tokens that count: results of the others are finite and mean nothing.

    Returns q and k normalized, when there are norms, and rotated: the pairs are (i, i + head_dim / 2), as in Hugging
    Face checkpoints. Computed in float32, rounded once.
    """

    def __call__(
        self,
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
    ) -> tuple[jax.Array, jax.Array]: ...


BACKENDS: tuple[tuple[str, Rotary], ...] = (("xla", xla.rotary), ("native", cpu.rotary))


def choose(linear_backend: str) -> Rotary:
    """The implementation that goes with a linear back end."""
    return cpu.rotary if linear_backend == "native" else xla.rotary
