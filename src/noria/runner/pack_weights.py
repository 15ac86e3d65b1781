"""Matrices for the native linear op: packed while they are read, GGUF blocks as they are."""

from __future__ import annotations

import jax
import numpy as np

from noria.nn.param import Param
from noria.ops.linear.pack import WeightPacker
from noria.ops.linear.types import KINDS, PackedWeight
from noria.weights.load import Tensors, empty_aligned


def pack_matrix(param: Param, tensors: Tensors, keep_blocks: bool) -> PackedWeight:
    """keep_blocks: GGUF blocks stay packed; otherwise they become the Param's dtype (float32 or bfloat16)."""
    rows, columns = param.shape[-2:]
    kinds = _block_kinds(tensors, columns, keep_blocks)
    packer = WeightPacker([kind or tensors.dtype.name for kind in kinds], rows, columns)
    buffer = None
    for index, kind in enumerate(kinds):
        if kind is not None:
            blocks, order = tensors.read_blocks(index)
            packer.write(index, blocks, order=order)
        else:
            buffer = empty_aligned((rows, columns), tensors.dtype) if buffer is None else buffer
            tensors.read(index, buffer)
            packer.write(index, buffer)
    return packer.finish()


def pack_array(array: np.ndarray) -> PackedWeight:
    """array: float32 or bfloat16 [layers, out, in]."""
    packer = WeightPacker([array.dtype.name] * len(array), *array.shape[1:])
    for index, matrix in enumerate(array):
        packer.write(index, matrix)
    return packer.finish()


def abstract_matrix(param: Param, tensors: Tensors, keep_blocks: bool) -> PackedWeight:
    """The shape of what pack_matrix makes; reads nothing."""
    rows, columns = param.shape[-2:]
    kinds = tuple(kind or tensors.dtype.name for kind in _block_kinds(tensors, columns, keep_blocks))
    return PackedWeight.abstract(kinds, rows, columns)


def abstract_array(array: jax.ShapeDtypeStruct) -> PackedWeight:
    """The shape of what pack_array makes."""
    layers, rows, columns = array.shape
    return PackedWeight.abstract((array.dtype.name,) * layers, rows, columns)


def _block_kinds(tensors: Tensors, columns: int, keep_blocks: bool) -> list[str | None]:
    return [_block_kind(tensors, index, columns) if keep_blocks else None for index in range(len(tensors))]


def _block_kind(tensors: Tensors, index: int, columns: int) -> str | None:
    kind = tensors.block_type(index)
    return kind if kind is not None and kind in KINDS and columns % KINDS[kind].block == 0 else None
