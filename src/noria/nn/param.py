"""The declaration of a weight: one place that gives its shape, random values, sharding axes and checkpoint name.

A model's weights are nested dataclasses (registered pytrees). The same dataclass holds `Param` leaves when it is a
declaration, `jax.ShapeDtypeStruct` leaves when abstract, and arrays when loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from noria.ops.linear.types import DenseWeight


@dataclass(frozen=True)
class Param:
    """shape and logical axes go together; the first axis is "layers" when the weights of all layers are stacked.

    source: name of the tensor in a Hugging Face checkpoint. "{layer}" in it stands for the index along the first axis,
    counted from first_layer, and "{expert}" for that along the second: each tensor is read into its own slice.
    matrix: it is only multiplied with or looked up in, so its leaf is a Weight of the linear op, which a back end may
    pack, and not a plain array. exact: it is never rounded to 8 bits.
    dtype: None means the dtype of the model; norms that must stay exact may name their own.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: str
    init: Literal["normal", "zeros", "ones"] = "normal"
    matrix: bool = False
    exact: bool = False
    first_layer: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.source}: shape {self.shape} and axes {self.axes} differ in length")

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.source

    @property
    def stacked_axes(self) -> int:
        """How many axes at the front count tensors."""
        return ("{layer}" in self.source) + ("{expert}" in self.source)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """In the order of the stacked axes."""
        if not self.stacked:
            return (self.source,)
        layers = (self.source.replace("{layer}", str(self.first_layer + index)) for index in range(self.shape[0]))
        if self.stacked_axes == 1:
            return tuple(layers)
        return tuple(name.replace("{expert}", str(index)) for name in layers for index in range(self.shape[1]))

    def numpy_dtype(self, default: str) -> np.dtype:
        return np.dtype(jnp.dtype(self.dtype or default))


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def map_params(function: Callable[[Param], Any], declaration: Any) -> Any:
    """The pytree of the declaration with every Param replaced by function(param)."""
    return jax.tree.map(function, declaration, is_leaf=is_param)


def abstract_params(declaration: Any, dtype: str) -> Any:
    return map_params(
        lambda p: dense_leaf(p, jax.ShapeDtypeStruct(dense_leaf_shape(p), p.numpy_dtype(dtype))), declaration
    )


def dense_leaf(param: Param, array: Any) -> Any:
    """What stands for the Param in loaded weights: the array (of its shape), or the Weight that holds it."""
    if not param.matrix:
        return array
    return DenseWeight(array if len(array.shape) > 2 else array[None])


def dense_leaf_shape(param: Param) -> tuple[int, ...]:
    """Of the array in it."""
    return (1, *param.shape) if param.matrix and not param.stacked else param.shape


def param_bytes(declaration: Any, dtype: str) -> int:
    leaves = jax.tree.leaves(declaration, is_leaf=is_param)
    return sum(math.prod(p.shape) * p.numpy_dtype(dtype).itemsize for p in leaves)


def num_parameters(declaration: Any) -> int:
    return sum(math.prod(param.shape) for param in jax.tree.leaves(declaration, is_leaf=is_param))


def random_params(declaration: Any, dtype: str, seed: int) -> Any:
    """Random weights of the declared shapes, the same for the same seed on every device (made by numpy on the host).

    seed: of 64 bits, signed or not.
    """
    seed %= 2**64
    leaves, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
    arrays = []
    for index, param in enumerate(leaves):
        kind = param.numpy_dtype(dtype)
        if param.init == "normal":
            fan_in = param.shape[-1]
            values = np.random.default_rng((seed, index)).standard_normal(param.shape, np.float32)
            array = jnp.asarray((values / math.sqrt(fan_in)).astype(kind))
        else:
            array = jnp.full(param.shape, 1 if param.init == "ones" else 0, kind)
        arrays.append(dense_leaf(param, array))
    return jax.tree.unflatten(treedef, arrays)
