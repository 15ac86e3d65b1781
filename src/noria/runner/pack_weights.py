"""How the matrices of a model become weights of the linear op: as they are, in 8 bits, or packed for the native op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.nn.param import Param, dense_leaf_shape
from noria.ops.linear.pack import WeightPacker
from noria.ops.linear.types import KINDS, DenseWeight, PackedWeight, Weight
from noria.weights.load import Tensors, empty_aligned

_INT8_MAX = np.float32(127)


@dataclass(frozen=True)
class MatrixForm:
    """packed: whether the linear op wants PackedWeight. quantization: the option, see EngineConfig."""

    packed: bool
    quantization: str

    @property
    def is_plain(self) -> bool:
        """Whether matrices are kept as the checkpoint has them."""
        return not self.packed and self.quantization != "int8"

    def load(self, param: Param, tensors: Tensors) -> Weight:
        """GGUF blocks stay as they are where the native op can use them and nothing else is asked for."""
        rows, columns = param.shape[-2:]
        blocks = self._block_kinds(param, tensors)
        kinds = [block or self._kind(param, tensors.dtype) for block in blocks]
        writer = WeightPacker(kinds, rows, columns) if self.packed else self._dense_writer(param, tensors.dtype)
        buffer = None
        for index, block in enumerate(blocks):
            if block is not None:
                source, order = tensors.read_blocks(index)
                assert isinstance(writer, WeightPacker)
                writer.write(index, source, order=order)
            else:
                dtype = np.dtype(np.float32) if kinds[index] == "int8" else tensors.dtype
                buffer = empty_aligned((rows, columns), dtype) if buffer is None else buffer
                tensors.read(index, buffer)
                writer.write(index, buffer)
        return writer.finish()

    def convert(self, param: Param, leaf: Any) -> Any:
        """Of weights that were made and not read: the leaf, if it is a matrix, in its form."""
        if not isinstance(leaf, DenseWeight) or (not self.packed and self._kind(param, leaf.data.dtype) != "int8"):
            return leaf
        array = np.asarray(leaf.data)
        kind = self._kind(param, array.dtype)
        matrices = array.reshape(-1, *array.shape[-2:])
        shape = matrices.shape[1:]
        writer = WeightPacker([kind] * len(matrices), *shape) if self.packed else _Int8Writer(array.shape)
        for index, matrix in enumerate(matrices):
            writer.write(index, matrix.astype(np.float32) if kind == "int8" else matrix)
        return writer.finish()

    def abstract(self, param: Param, tensors: Tensors) -> Weight:
        """The shape of what load makes; reads nothing."""
        blocks = self._block_kinds(param, tensors)
        kinds = tuple(block or self._kind(param, tensors.dtype) for block in blocks)
        return self._abstract(param, kinds, dense_leaf_shape(param))

    def abstract_converted(self, param: Param, leaf: Any) -> Any:
        """The shape of what convert makes."""
        if not isinstance(leaf, DenseWeight):
            return leaf
        shape = leaf.data.shape
        return self._abstract(param, (self._kind(param, leaf.data.dtype),) * math.prod(shape[:-2]), shape)

    def _abstract(self, param: Param, kinds: tuple[str, ...], shape: tuple[int, ...]) -> Weight:
        if self.packed:
            return PackedWeight.abstract(kinds, *shape[-2:])
        array: Any = jax.ShapeDtypeStruct
        if kinds[0] != "int8":
            return DenseWeight(array(shape, kinds[0]))
        return DenseWeight(array(shape, jnp.int8), array(shape[:-1], jnp.float32))

    def _dense_writer(self, param: Param, dtype: np.dtype) -> _DenseWriter:
        shape = dense_leaf_shape(param)
        return _DenseWriter(shape, dtype) if self._kind(param, dtype) != "int8" else _Int8Writer(shape)

    def _kind(self, param: Param, dtype: np.dtype) -> str:
        return "int8" if self.quantization == "int8" and not param.exact else dtype.name

    def _block_kinds(self, param: Param, tensors: Tensors) -> list[str | None]:
        keep = self.packed and self.quantization == "auto"
        return [_block_kind(tensors, index, param.shape[-1]) if keep else None for index in range(len(tensors))]


class _DenseWriter:
    """Matrices as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """shape: [layers, out, in] or [layers, experts, out, in]; the axes in front count matrices."""
        self._data = empty_aligned(shape, dtype)
        self._matrices = self._data.reshape(-1, *shape[-2:])

    def write(self, layer: int, matrix: np.ndarray) -> None:
        self._matrices[layer] = matrix

    def finish(self) -> DenseWeight:
        return DenseWeight(jnp.asarray(self._data))


class _Int8Writer(_DenseWriter):
    """Symmetric 8-bit integers with a scale for each output, as the native packer makes them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape, np.dtype(np.int8))
        self._scale = np.empty(shape[:-1], np.float32)
        self._scales = self._scale.reshape(-1, shape[-2])

    def write(self, layer: int, matrix: np.ndarray) -> None:
        """matrix: float32 [rows, columns]."""
        top = np.abs(matrix).max(axis=1)
        self._scales[layer] = top / _INT8_MAX
        inverse = np.divide(_INT8_MAX, top, out=np.zeros_like(top), where=top > 0)
        np.rint(matrix * inverse[:, None], out=self._matrices[layer], casting="unsafe")

    def finish(self) -> DenseWeight:
        return DenseWeight(jnp.asarray(self._data), jnp.asarray(self._scale))


def _block_kind(tensors: Tensors, index: int, columns: int) -> str | None:
    kind = tensors.block_type(index)
    return kind if kind is not None and kind in KINDS and columns % KINDS[kind].block == 0 else None
