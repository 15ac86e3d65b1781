"""A mixture of experts without dropped tokens: every token gets the MLPs it chose, however many chose the same."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax

from noria.ops.experts import ragged, reference, tiled
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.grouped_matmul import api as grouped_matmul
from noria.ops.linear.api import Backend

__all__ = ["Choice", "ExpertMatrices", "Experts", "choose"]


class Experts(Protocol):
    """The signature that every implementation has.

    x: [T, K], float32 or bfloat16. matrices: those of num_experts experts in every layer, of which the first one has
    the id `first`; choices of others add nothing (another device has them). layer, rows: int32 scalars, the layer
    whose experts are used, and the number of rows of x that count: results of the others are finite and mean nothing.

    Returns float32 [T, K]: of each token the sum over its choices of share * down(activation(gate x) * up x). What is
    between the products has the dtype of x.
    """

    def __call__(
        self,
        x: jax.Array,
        matrices: ExpertMatrices,
        layer: jax.Array,
        rows: jax.Array,
        choice: Choice,
        *,
        num_experts: int,
        activation: str,
        first: jax.Array | int = 0,
    ) -> jax.Array: ...


def choose(linear: Backend, platform: str) -> Experts:
    """The implementation that goes with a linear op: the fastest that the platform ("cpu", "gpu", "tpu") has."""
    if linear.name == "reference":
        return reference.experts
    if platform == "cpu":
        return partial(tiled.experts, linear=linear.linear)
    return partial(ragged.experts, multiply=grouped_matmul.choose(platform))
