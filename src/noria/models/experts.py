"""The mixture of experts that stands in place of the MLP: its weights, and what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from noria.models.config import DecoderConfig, Moe
from noria.nn.param import Param
from noria.ops.backends import Ops
from noria.ops.experts.types import ExpertMatrices

Leaf = Any  # a Param in a declaration, an array in loaded weights


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """Of the layers that have experts. None where the family has no such thing."""

    router: Leaf  # [layers, experts, E]
    correction: Leaf  # [layers, experts] float32
    matrices: ExpertMatrices
    shared_gate: Leaf  # the MLP that all tokens share: [layers, shared, E]
    shared_up: Leaf
    shared_down: Leaf  # [layers, E, shared]


def declare(config: DecoderConfig, moe: Moe) -> MoeWeights:
    """The weights as Params."""
    layers, hidden = config.num_layers - moe.first_layer, config.hidden_size
    param = partial(Param, matrix=True, first_layer=moe.first_layer)
    name = "model.layers.{layer}.mlp."

    def expert(matrix: str, out: str, into: str) -> Param:
        sizes = {"embed": hidden, "expert_mlp": moe.size}
        shape, axes = (layers, moe.experts, sizes[out], sizes[into]), ("layers", "expert", out, into)
        return param(shape, axes, f"{name}experts.{{expert}}.{matrix}.weight")

    def shared(matrix: str, out: str, into: str) -> Param | None:
        sizes = {"embed": hidden, "mlp": moe.shared_size}
        shape, axes = (layers, sizes[out], sizes[into]), ("layers", out, into)
        return param(shape, axes, f"{name}shared_experts.{matrix}.weight") if moe.shared_size else None

    return MoeWeights(
        router=param(
            (layers, moe.routing.experts, hidden), ("layers", "router", "embed"), name + "gate.weight", exact=True
        ),
        correction=Param(
            (layers, moe.routing.experts),
            ("layers", "router"),
            name + "gate.e_score_correction_bias",
            init="zeros",
            first_layer=moe.first_layer,
            dtype="float32",
        )
        if moe.has_correction
        else None,
        matrices=ExpertMatrices(
            gate=expert("gate_proj", "expert_mlp", "embed"),
            up=expert("up_proj", "expert_mlp", "embed"),
            down=expert("down_proj", "embed", "expert_mlp"),
        ),
        shared_gate=shared("gate_proj", "mlp", "embed"),
        shared_up=shared("up_proj", "mlp", "embed"),
        shared_down=shared("down_proj", "embed", "mlp"),
    )


def mixture(
    config: DecoderConfig, moe: Moe, weights: MoeWeights, x: jax.Array, layer: jax.Array, rows: jax.Array, ops: Ops
) -> jax.Array:
    """x [T, E], normalized -> float32 [T, E], what is added to the residual. layer: of the model; rows: that count."""
    index = layer - moe.first_layer
    float32 = jnp.dtype(jnp.float32)
    (logits,) = ops.linear.linear(x, (weights.router,), index, rows, out_dtype=float32)
    correction = None if weights.correction is None else weights.correction[index]
    choice, activation = moe.routing(logits, correction), config.activation
    y = ops.experts(x, weights.matrices, index, rows, choice, num_experts=moe.experts, activation=activation)
    if not moe.shared_size:
        return y
    pair = (weights.shared_gate, weights.shared_up)
    (inner,) = ops.linear.linear(x, pair, index, rows, activation=activation)
    (shared,) = ops.linear.linear(inner, (weights.shared_down,), index, rows, out_dtype=float32)
    return y + shared
