"""From a checkpoint to the weights of a model: every Param of the declaration is filled and placed, one by one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from noria.errors import WeightsError
from noria.nn.param import Param, is_param, param_bytes
from noria.weights.base import Checkpoint

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes; XLA's CPU client then takes the buffer over instead of copying it
# A bias or a norm that a layer has but the model does not ask for would change the result.
_MUST_BE_USED = re.compile(r"(?:model\.layers|blk)\.\d+\.(?:.*\.bias|.*norm[^.]*\.weight)")


def load_weights(
    checkpoint: Checkpoint,
    declaration: Any,
    dtype: str,
    place: Callable[[np.ndarray, Param], jax.Array],
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The pytree of `declaration` with every Param replaced by its array.

    dtype: of every Param that names none. place: puts a filled host buffer on its device and sharding; the buffer is
    not touched afterwards, so it may become the array's memory (`place_on` does that on a CPU). progress: called with
    the bytes filled so far and in total. At most the result and one leaf are held at a time.
    Raises WeightsError, before anything is read, when a tensor is missing or of another shape, and when the checkpoint
    has a bias or norm in a layer that the declaration does not know.
    """
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
    _check(checkpoint, leaves)
    total, done = param_bytes(declaration, dtype), 0
    arrays = []
    for param in leaves:
        buffer = empty_aligned(param.shape, param.numpy_dtype(dtype))
        for name, index in _sources(param):
            part = buffer if index is None else buffer[index]
            checkpoint.read(name, part)
            done += part.nbytes
            if progress is not None:
                progress(done, total)
        arrays.append(place(buffer, param))
        del buffer, part  # the next leaf must not find this one still held
    return jax.tree.unflatten(treedef, arrays)


def place_on(target: Any) -> Callable[[np.ndarray, Param], jax.Array]:
    """A `place` for load_weights. On a CPU the array takes over the buffer, elsewhere it is copied to the device.

    target: a jax.Device or a jax.sharding.Sharding.
    """
    return lambda buffer, _: jax.device_put(buffer, target, may_alias=True)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like numpy.empty, aligned so that JAX can use the memory without a copy on a CPU."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _sources(param: Param) -> list[tuple[str, int | None]]:
    """Names of the tensors of a Param, with the index along the first axis where each belongs."""
    if not param.stacked:
        return [(param.source, None)]
    return [(param.source.replace("{layer}", str(layer)), layer) for layer in range(param.shape[0])]


def _check(checkpoint: Checkpoint, params: list[Param]) -> None:
    names = checkpoint.names()
    used: set[str] = set()
    for param in params:
        expected = param.shape[1:] if param.stacked else param.shape
        for name, _ in _sources(param):
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
