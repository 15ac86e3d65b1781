"""Ragged paged attention: decode rows and prefill chunks of many requests in one call, cache write included."""

from __future__ import annotations

from typing import Protocol

import jax

from noria.ops import native
from noria.ops.ragged_paged_attention import cpu, reference, tpu, xla
from noria.ops.ragged_paged_attention.types import (
    CACHE_DTYPES,
    FULL_ATTENTION,
    KVCache,
    LayerAddress,
    RaggedBatch,
)

__all__ = [
    "BACKENDS",
    "CACHE_DTYPES",
    "FULL_ATTENTION",
    "KVCache",
    "LayerAddress",
    "RaggedBatch",
    "RaggedPagedAttention",
    "choose",
]


class RaggedPagedAttention(Protocol):
    """The signature that every implementation has.

    q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], heads a multiple of kv_heads. The new keys and values are
    first written to the cache (as the cache's dtype can hold them), then each token attends to what the cache holds of
    its own row: the positions p - window + 1 .. p for a token at position p. Returns the attention output [T, heads,
    head_dim] in the dtype of q, of no meaning for padding tokens but finite, and the cache, updated in place when it is
    donated or carried by a loop.

    v is None where the values are the keys, in caches of one plane, which the implementations in XLA take.

    scale multiplies the scores; soft_cap c turns them into c * tanh(scores / c).
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        cache: KVCache,
        batch: RaggedBatch,
        layer: LayerAddress,
        *,
        scale: float,
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, KVCache]: ...


# The ones that take everything. "pallas", for TPUs, has another form of cache and takes what tpu.unsupported allows.
BACKENDS: tuple[tuple[str, RaggedPagedAttention], ...] = (
    ("reference", reference.ragged_paged_attention),
    ("xla", xla.ragged_paged_attention),
    ("native", cpu.ragged_paged_attention),
)


def choose(name: str, platform: str) -> RaggedPagedAttention:
    """The implementation of that name; "auto" is the fastest one that the platform ("cpu", "gpu", "tpu") has
    and that takes everything."""
    if name == "pallas":
        return tpu.ragged_paged_attention
    if name == "auto":
        name = "native" if platform == "cpu" and native.available() else "xla"
    return dict(BACKENDS)[name]
