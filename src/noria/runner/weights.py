"""The weights of a model on its device: read, made up, or only described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from noria.nn.param import abstract_params, random_params
from noria.ops.linear.types import DenseWeight
from noria.runner.pack_weights import MatrixForm
from noria.weights.base import Checkpoint
from noria.weights.load import abstract_weights, load_weights, place_on


@dataclass(frozen=True)
class WeightPlace:
    """How the weights of a declaration are kept, and where. dtype: of weights and activations."""

    matrices: MatrixForm
    dtype: str
    device: Any  # a jax.Device

    def load(
        self,
        declaration: Any,
        checkpoint: Checkpoint | None,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """From a checkpoint, or, when there is none, random weights."""
        if checkpoint is None:
            with jax.default_device(self.device):
                weights = random_params(declaration, self.dtype, seed)
            if not self.matrices.is_plain:
                weights = _map_weights(self.matrices.convert, weights)
        else:
            make = None if self.matrices.is_plain else self.matrices.load
            weights = load_weights(checkpoint, declaration, self.dtype, place_on(self.device), progress, make)
        # All committed to the device: the compiled programs are then the same wherever weights came from.
        return jax.device_put(weights, self.device)

    def describe(self, declaration: Any, checkpoint: Checkpoint | None) -> Any:
        """The shapes of what load would make; they lower to the same programs."""
        if checkpoint is None:
            weights = abstract_params(declaration, self.dtype)
            if not self.matrices.is_plain:
                weights = _map_weights(self.matrices.abstract_converted, weights)
        else:
            make = None if self.matrices.is_plain else self.matrices.abstract
            weights = abstract_weights(checkpoint, declaration, self.dtype, make)
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), weights)


def _map_weights(function: Callable[[DenseWeight], Any], weights: Any) -> Any:
    is_weight = lambda leaf: isinstance(leaf, DenseWeight)
    return jax.tree.map(lambda leaf: function(leaf) if is_weight(leaf) else leaf, weights, is_leaf=is_weight)
