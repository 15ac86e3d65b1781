"""The weights of a model on its devices: read, made up, or only described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from noria.config import ResolvedConfig
from noria.errors import ConfigError
from noria.nn.param import Param, abstract_params, dense_leaf, random_params
from noria.ops.linear.types import PackedWeight
from noria.parallel.placement import Placement
from noria.runner.pack_weights import MatrixForm
from noria.weights.base import Checkpoint
from noria.weights.load import Tensors, abstract_weights, load_weights


@dataclass(frozen=True)
class WeightPlace:
    """How the weights of a declaration are kept, and where. dtype: of weights and activations."""

    matrices: MatrixForm
    dtype: str
    placement: Placement

    def load(
        self,
        declaration: Any,
        checkpoint: Checkpoint | None,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """From a checkpoint, or, when there is none, random weights."""
        put = self.placement.put
        if checkpoint is None:
            with jax.default_device(self.placement.local_devices[0]):
                weights = random_params(declaration, self.dtype, seed)
            if not self.matrices.is_plain:
                weights = self.placement.map(self.matrices.convert, declaration, weights)
            return self.placement.map(put, declaration, weights)

        def place(buffer: np.ndarray, param: Param) -> Any:
            return put(param, dense_leaf(param, buffer))

        def pack(param: Param, tensors: Tensors) -> Any:
            return put(param, self.matrices.load(param, tensors))

        make = None if self.matrices.is_plain else pack
        return load_weights(checkpoint, declaration, self.dtype, place, progress, make)

    def describe(self, declaration: Any, checkpoint: Checkpoint | None) -> Any:
        """The shapes of what load would make, with their places; they lower to the same programs."""
        if checkpoint is None:
            weights = abstract_params(declaration, self.dtype)
            if not self.matrices.is_plain:
                weights = self.placement.map(self.matrices.abstract_converted, declaration, weights)
        else:
            make = None if self.matrices.is_plain else self.matrices.abstract
            weights = abstract_weights(checkpoint, declaration, self.dtype, make)
        return self.placement.map(self.placement.describe, declaration, weights)

    def plain_shapes(self, declaration: Any) -> Any:
        """As describe, of matrices that are not packed."""
        return self.placement.map(self.placement.describe, declaration, abstract_params(declaration, self.dtype))


def check_rounding(config: ResolvedConfig, weights: Any) -> None:
    """Raises ConfigError when activations are to be rounded and no weight is of a kind that they are rounded for."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))
    if config.quantize_activations and not any(isinstance(leaf, PackedWeight) and leaf.has_codes for leaf in leaves):
        raise ConfigError(
            "quantize_activations would change nothing, because no matrix of this model is quantized; "
            "add quantization int8, use a quantized GGUF file, or leave it out"
        )
