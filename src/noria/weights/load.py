"""From a checkpoint to the weights of a model: every Param of the declaration is filled and placed, one by one."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from noria.errors import WeightsError
from noria.nn.param import Param, abstract_params, dense_leaf, is_param, param_bytes
from noria.weights.base import Checkpoint

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes; XLA's CPU client then takes the buffer over instead of copying it
# A bias or a norm that a layer has but the model does not ask for would change the result.
_MUST_BE_USED = re.compile(r"(?:model\.layers|blk)\.\d+\.(?:.*\.bias|.*norm[^.]*\.weight)")


def load_weights(
    checkpoint: Checkpoint,
    declaration: Any,
    dtype: str,
    place: Callable[[np.ndarray, Param], Any],
    progress: Callable[[int, int], None] | None = None,
    pack: Callable[[Param, Tensors], Any] | None = None,
) -> Any:
    """The pytree of `declaration` with every Param replaced by its array.

    dtype: of every Param that names none. place: puts a filled host buffer on its device and sharding; the buffer is
    not touched afterwards, so it may become the array's memory (`place_on` does that on a CPU). progress: called with
    the bytes filled so far and in total. pack: makes the leaf of a Param that is a matrix from its tensors, in place of
    filling a buffer. At most the result and one leaf are held at a time.
    Raises WeightsError, before anything is read, when a tensor is missing or of another shape, and when the checkpoint
    has a bias or norm in a layer that the declaration does not know.
    """
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
    _check(checkpoint, leaves)
    total, done = param_bytes(declaration, dtype), 0
    arrays = []

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    for param in leaves:
        tensors = Tensors(checkpoint, param.tensor_names, param.numpy_dtype(dtype), report)
        if param.matrix and pack is not None:
            arrays.append(pack(param, tensors))
        else:
            arrays.append(place(_filled(param, tensors), param))
    return jax.tree.unflatten(treedef, arrays)


def abstract_weights(
    checkpoint: Checkpoint, declaration: Any, dtype: str, pack: Callable[[Param, Tensors], Any] | None = None
) -> Any:
    """The shapes (jax.ShapeDtypeStruct) of what load_weights makes, without reading a tensor.

    pack: makes the shape of the leaf of a Param that is a matrix. Raises WeightsError like load_weights.
    """
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
    _check(checkpoint, leaves)
    arrays = []
    for param in leaves:
        if param.matrix and pack is not None:
            tensors = Tensors(checkpoint, param.tensor_names, param.numpy_dtype(dtype), lambda num_bytes: None)
            arrays.append(pack(param, tensors))
        else:
            arrays.append(abstract_params(param, dtype))
    return jax.tree.unflatten(treedef, arrays)


@dataclass(frozen=True)
class Tensors:
    """The tensors of one Param in a checkpoint: one per layer, or per layer and expert, or a single one.

    dtype: that the Param is to have. report: takes the number of bytes, in that dtype, of what was read.
    """

    checkpoint: Checkpoint
    names: tuple[str, ...]
    dtype: np.dtype
    report: Callable[[int], None]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int, out: np.ndarray) -> None:
        self.checkpoint.read(self.names[index], out)
        self.report(out.size * self.dtype.itemsize)

    def block_type(self, index: int) -> str | None:
        return self.checkpoint.block_type(self.names[index])

    def read_blocks(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """See Checkpoint.read_blocks."""
        blocks = self.checkpoint.read_blocks(self.names[index])
        self.report(math.prod(self.checkpoint.shape(self.names[index])) * self.dtype.itemsize)
        return blocks


def _filled(param: Param, tensors: Tensors) -> np.ndarray:
    buffer = empty_aligned(param.shape, tensors.dtype)
    each = buffer.reshape(len(tensors), *param.shape[param.stacked_axes :])
    for index, one in enumerate(each):
        tensors.read(index, one)
    return buffer


def place_on(target: Any) -> Callable[[np.ndarray, Param], Any]:
    """A `place` for load_weights. On a CPU the array takes over the buffer, elsewhere it is copied to the device.

    target: a jax.Device or a jax.sharding.Sharding.
    """
    return lambda buffer, param: dense_leaf(param, jax.device_put(buffer, target, may_alias=True))


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like numpy.empty, aligned so that JAX can use the memory without a copy on a CPU."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _check(checkpoint: Checkpoint, params: list[Param]) -> None:
    names = checkpoint.names()
    used: set[str] = set()
    for param in params:
        expected = param.shape[param.stacked_axes :]
        for name in param.tensor_names:
            if name not in names:
                raise WeightsError(
                    f"{checkpoint.path} has no tensor {name} of shape {expected}; is the model complete, and does its "
                    "config belong to it?"
                )
            if (found := checkpoint.shape(name)) != expected:
                raise WeightsError(
                    f"{checkpoint.path}: tensor {name} has shape {found}, but the model's config asks for {expected}"
                )
            used.add(name)
    unused = sorted(names - used)
    for name in unused:
        if _MUST_BE_USED.fullmatch(name):
            raise WeightsError(
                f"{checkpoint.path} has the tensor {name}, which this model does not use; the results would be wrong. "
                "Is it another architecture than its config says, or has it more layers?"
            )
    if unused:
        _log.debug("%s: tensors not used: %s", checkpoint.path, ", ".join(unused))
