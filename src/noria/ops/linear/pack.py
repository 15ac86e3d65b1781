"""From checkpoint rows to packed weights. Needs the native library; GGUF blocks are re-ordered, never dequantized."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np

from noria.ops import native
from noria.ops.linear.types import ALIGNMENT, KINDS, LANES, PackedWeight

_SOURCE_DTYPE: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.float32),
}


class WeightPacker:
    """Packs the layers of one weight, in any order and in pieces of rows, then hands over the whole.

    Raises RuntimeError when there is no native library, ValueError when a shape does not fit.
    """

    def __init__(self, kinds: Sequence[str], out_features: int, in_features: int, threads: int | None = None) -> None:
        library = native.load()
        if isinstance(library, str):
            raise RuntimeError(f"the native library is needed to pack weights; it {library}")
        for kind in set(kinds):
            if KINDS[kind].source_block_bytes and in_features % KINDS[kind].block:
                raise ValueError(f"rows of {in_features} elements are no whole blocks of {kind}")
        self._pack = library.handle.noria_pack
        self._threads = threads or os.cpu_count() or 1
        size = PackedWeight.total_bytes(tuple(kinds), out_features, in_features)
        self._data = _aligned(size)
        abstract = PackedWeight.abstract(tuple(kinds), out_features, in_features)
        self._weight, self._offsets = abstract, abstract.offsets

    def write(self, layer: int, source: np.ndarray, *, first_row: int = 0, order: np.ndarray | None = None) -> None:
        """Packs some rows of a layer's matrix [out, in].

        source: uint8 [rows, bytes of a row] of GGUF blocks, [rows, in] of float32 for float32 and int8 (quantized
        here, symmetric, one scale for each output), of bfloat16 for bfloat16.
        first_row: where they go, a multiple of 16; so is the number of rows unless they are the last.
        order: int32 [rows]: row n of the weight is row order[n] of source.
        """
        weight = self._weight
        name = weight.kinds[layer]
        kind = KINDS[name]
        rows, end = len(source), first_row + len(source)
        width, dtype = weight.in_features, _SOURCE_DTYPE.get(name, np.dtype(np.uint8))
        if kind.source_block_bytes:
            width = weight.in_features // kind.block * kind.source_block_bytes
        if source.shape != (rows, width) or source.dtype != dtype:
            raise ValueError(f"rows of {name} must be {dtype} [..., {width}], not {source.dtype} {source.shape}")
        if first_row % LANES or end > weight.out_features or (end % LANES and end != weight.out_features):
            raise ValueError(f"rows {first_row} to {end} of {weight.out_features} are no whole tiles of {LANES}")
        source = np.ascontiguousarray(source)
        if order is not None:
            order = np.ascontiguousarray(order, np.int32)
            if order.shape != (rows,) or order.min() < 0 or order.max() >= rows:
                raise ValueError("order must name a row of source for each row")
        tiles = -(-rows // LANES)
        begin = self._offsets[layer] + first_row // LANES * (kind.packed_bytes(LANES, weight.in_features))
        target = self._data[begin:]

        def piece(first: int, last: int) -> None:
            self._pack(
                kind.number,
                source.ctypes.data,
                source.strides[0],
                None if order is None else order.ctypes.data,
                rows,
                weight.in_features,
                first,
                last,
                target.ctypes.data,
            )

        cuts = np.linspace(0, tiles, min(self._threads, tiles) + 1).astype(int)
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(piece, cuts[:-1].tolist(), cuts[1:].tolist()))

    def finish(self) -> PackedWeight:
        """The weight on JAX's CPU device, without another copy; the packer must not be used any more."""
        weight, data = self._weight, self._data
        del self._data
        array = jax.device_put(data, jax.devices("cpu")[0], may_alias=True)
        return PackedWeight(array, weight.kinds, weight.out_features, weight.in_features)


def _aligned(size: int) -> np.ndarray:
    """Aligned memory is what JAX can use without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
