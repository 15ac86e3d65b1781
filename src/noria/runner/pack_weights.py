"""How the matrices of a model become weights of the linear op: as they are, in 8 bits, or packed for the native op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.nn.param import Param
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
        blocks = self._block_kinds(tensors, columns)
        kinds = [block or self._kind(tensors.dtype) for block in blocks]
        writer = WeightPacker(kinds, rows, columns) if self.packed else _Int8Writer(len(kinds), rows, columns)
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

    def convert(self, weight: DenseWeight) -> Weight:
        """Of weights that were made and not read."""
        array = np.asarray(weight.data)
        kind = self._kind(array.dtype)
        layers = len(array)
        writer = WeightPacker([kind] * layers, *array.shape[1:]) if self.packed else _Int8Writer(*array.shape)
        for index, matrix in enumerate(array):
            writer.write(index, matrix.astype(np.float32) if kind == "int8" else matrix)
        return writer.finish()

    def abstract(self, param: Param, tensors: Tensors) -> Weight:
        """The shape of what load makes; reads nothing."""
        rows, columns = param.shape[-2:]
        kinds = tuple(block or self._kind(tensors.dtype) for block in self._block_kinds(tensors, columns))
        return self._abstract(kinds, rows, columns)

    def abstract_converted(self, weight: DenseWeight) -> Weight:
        """The shape of what convert makes."""
        layers, rows, columns = weight.data.shape
        return self._abstract((self._kind(weight.data.dtype),) * layers, rows, columns)

    def _abstract(self, kinds: tuple[str, ...], rows: int, columns: int) -> Weight:
        if self.packed:
            return PackedWeight.abstract(kinds, rows, columns)
        shape: Any = jax.ShapeDtypeStruct
        return DenseWeight(shape((len(kinds), rows, columns), jnp.int8), shape((len(kinds), rows), jnp.float32))

    def _kind(self, dtype: np.dtype) -> str:
        return "int8" if self.quantization == "int8" else dtype.name

    def _block_kinds(self, tensors: Tensors, columns: int) -> list[str | None]:
        keep = self.packed and self.quantization == "auto"
        return [_block_kind(tensors, index, columns) if keep else None for index in range(len(tensors))]


class _Int8Writer:
    """Symmetric 8-bit integers with a scale for each output, as the native packer makes them."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._data = empty_aligned((layers, rows, columns), np.dtype(np.int8))
        self._scale = np.empty((layers, rows), np.float32)

    def write(self, layer: int, matrix: np.ndarray) -> None:
        """matrix: float32 [rows, columns]."""
        top = np.abs(matrix).max(axis=1)
        self._scale[layer] = top / _INT8_MAX
        inverse = np.divide(_INT8_MAX, top, out=np.zeros_like(top), where=top > 0)
        np.rint(matrix * inverse[:, None], out=self._data[layer], casting="unsafe")

    def finish(self) -> DenseWeight:
        return DenseWeight(jnp.asarray(self._data), jnp.asarray(self._scale))


def _block_kind(tensors: Tensors, index: int, columns: int) -> str | None:
    kind = tensors.block_type(index)
    return kind if kind is not None and kind in KINDS and columns % KINDS[kind].block == 0 else None
