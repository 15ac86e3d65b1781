"""Products of activations with weights: one or several weights in one call, layer chosen at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from noria.ops import native
from noria.ops.linear import cpu, reference, tpu, xla
from noria.ops.linear.types import KINDS, DenseWeight, PackedWeight, Weight
from noria.ops.rms_norm import RmsNorm

__all__ = ["BACKENDS", "KINDS", "Argmax", "Backend", "DenseWeight", "Linear", "PackedWeight", "Weight", "choose"]


class Linear(Protocol):
    """The signature that every implementation has.

    x: [T, K], float32 or bfloat16. weights: up to 4 with K inputs each and the same number of layers; layer: int32
    scalar, the layer whose matrices [N, K] are used. rows: int32 scalar, the number of rows of x that count: results of
    the others are finite and mean nothing. biases: for each weight [layers, N] or None.

    Returns x times matrix transposed, plus bias, [T, N] for each weight, summed in float32 and rounded once to
    out_dtype (float32 or bfloat16, that of x by default). With an activation ("silu" or "gelu_tanh") there are two
    weights of one shape, gate and up, and one result: activation(gate's) * up's, in float32 between; gate's and up's
    may be rounded to x's dtype.

    quantize_x: for packed weights of codes (int8 and GGUF blocks), activations are rounded to 8-bit multiples of a
    scale that 32 neighbours along K share, which is faster and less exact. Other weights are always multiplied exactly.

    norm: of x before the product, rounded to x's dtype. post_norm: of the result, before residual [T, N], of out_dtype,
    is added; with either there is one result. They are parts of this op because a separate pass over a few short rows
    costs more in starting it than in doing it.
    """

    def __call__(
        self,
        x: jax.Array,
        weights: Sequence[Weight],
        layer: jax.Array,
        rows: jax.Array,
        *,
        norm: RmsNorm | None = None,
        biases: Sequence[jax.Array | None] | None = None,
        activation: str | None = None,
        post_norm: RmsNorm | None = None,
        residual: jax.Array | None = None,
        out_dtype: jnp.dtype | None = None,
        quantize_x: bool = False,
    ) -> tuple[jax.Array, ...]: ...


class Argmax(Protocol):
    """The greedy choice without its logits: for each row of x [T, K] the index of the largest product with layer 0 of
    the weight [V, K], the first of equals among the first num_choices, [T] int32.

    A row whose largest is not a finite number, or that holds a NaN, gets -1. rows, norm, quantize_x: as for Linear.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        rows: jax.Array,
        *,
        num_choices: int,
        norm: RmsNorm | None = None,
        quantize_x: bool = False,
    ) -> jax.Array: ...


class Embed(Protocol):
    """Rows of layer 0 of a weight [V, K], so that a table tied to the head is stored once.

    token_ids: [T] int32, clipped to the table. Returns [T, K] in dtype, float32 or bfloat16.
    """

    def __call__(self, table: Weight, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array: ...


@dataclass(frozen=True)
class Backend:
    """packed: whether its weights are PackedWeight (made by pack.WeightPacker) or DenseWeight."""

    name: str
    linear: Linear
    argmax: Argmax
    embed: Embed
    packed: bool


BACKENDS: tuple[Backend, ...] = (
    Backend("reference", reference.linear, reference.argmax, reference.embed, packed=False),
    Backend("xla", xla.linear, xla.argmax, xla.embed, packed=False),
    Backend("native", cpu.linear, cpu.argmax, cpu.embed, packed=True),
)


PALLAS = Backend("pallas", tpu.linear, tpu.argmax, xla.embed, packed=False)  # for TPUs, of one device


def choose(name: str, platform: str) -> Backend:
    """The implementation of that name; "auto" is the fastest one that the platform ("cpu", "gpu", "tpu") has."""
    if name == "pallas":
        return PALLAS
    if name == "auto":
        name = "native" if platform == "cpu" and native.available() else "xla"
    return next(backend for backend in BACKENDS if backend.name == name)
