"""What the op of experts works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import tree_util

from noria.ops.linear.types import DenseWeight, Weight


@tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertMatrices:
    """Weights that hold the matrices of all experts of all layers: gate and up [inner, K], down [K, inner].

    Dense ones are [layers, experts, out, in]; in packed ones expert e of layer l is number l * experts + e.
    """

    gate: Any
    up: Any
    down: Any

    def one_by_one(self) -> ExpertMatrices:
        """The same as weights in which expert e of layer l is "layer" l * experts + e of the linear op."""
        return ExpertMatrices(*map(_flat, (self.gate, self.up, self.down)))


@tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """The experts of each token, all different, and what each one's result is multiplied with."""

    ids: jax.Array  # [T, chosen] int32
    shares: jax.Array  # [T, chosen] float32


def _flat(weight: Weight) -> Weight:
    if not isinstance(weight, DenseWeight):
        return weight
    data, scale = weight.data, weight.scale
    return DenseWeight(
        data.reshape(-1, *data.shape[-2:]), None if scale is None else scale.reshape(-1, scale.shape[-1])
    )
