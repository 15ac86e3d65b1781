"""The Pallas kernel for TPUs on a CPU: JAX's interpreter, and two things that it cannot do (jax 0.10.2).

It fails on loads from a reference that was reshaped, and on masked stores to a part of a buffer. Both are replaced by
what they mean: load everything and index the value; load, choose and store. The rest is the kernel's own code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from noria.ops.ragged_paged_attention import tpu
from noria.ops.ragged_paged_attention.api import CACHE_DTYPES, KVCache


class _Loaded:
    """A value that answers to what the kernel asks of a reference."""

    def __init__(self, values: jax.Array) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def reshape(self, *shape: int) -> _Loaded:
        return _Loaded(self.values.reshape(*shape))

    def bitcast(self, dtype: Any) -> jax.Array:
        """16-bit values as words of 32, two neighbouring rows together, as a TPU's registers hold them."""
        rows, columns = self.values.shape
        pairs = self.values.reshape(rows // 2, 2, columns)
        return jax.lax.bitcast_convert_type(jnp.moveaxis(pairs, 1, -1), dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.values[index]


def _store(ref: Any, values: jax.Array, *, mask: jax.Array) -> None:
    ref[...] = jnp.where(mask, values, ref[...])


@contextmanager
def interpreted() -> Iterator[None]:
    """What is traced inside is interpreted, in tiles so small that sequences have several."""
    copies = kernel.MultiPageAsyncCopyDescriptor
    wait = copies.wait

    def wait_and_load(self: Any) -> _Loaded:
        wait(self)
        return _Loaded(self._vmem_buf[...])

    with (
        mock.patch.object(copies, "wait", wait_and_load),
        mock.patch.object(pltpu, "store", _store),
        mock.patch.object(tpu, "_MAX_TOKENS", 32),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield


def ragged_paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, *rest: Any, windows: tuple[int, ...], **options: Any
) -> tuple[jax.Array, KVCache]:
    """The op of ops/ragged_paged_attention/tpu.py, interpreted. cache: as on a CPU."""
    shape, kind = cache.data.shape, cache.data.dtype
    data = jax.lax.bitcast_convert_type(cache.data, CACHE_DTYPES[cache.dtype])
    joined = dataclasses.replace(cache, data=data.reshape(*shape[:2], -1, shape[-1]))
    with interpreted():
        out, joined = tpu.ragged_paged_attention(q, k, v, joined, *rest, windows=windows, **options)
    return out, dataclasses.replace(cache, data=jax.lax.bitcast_convert_type(joined.data, kind).reshape(shape))
