"""Products of rows with the matrices of their groups: experts of a mixture, or one matrix of a layer."""

from __future__ import annotations

from typing import Protocol

import jax

from noria.ops.grouped_matmul import reference, tpu

__all__ = ["GroupedMatmul", "choose"]


class GroupedMatmul(Protocol):
    """The signature that every implementation has.

    x: [m, k], float32 or bfloat16, its rows sorted by group. matrices: [matrices, n, k] in the dtype of x, or int8 or
    float8 with scale, float32 [matrices, n]. counts: int32 [groups], rows of each group, together at most m. first:
    int32 scalar; the rows of group g are multiplied with the transpose of matrices[first + g]. So the matrices of all
    layers may be given, and none is copied.

    Returns float32 [m, n], of no meaning, and perhaps not finite, in rows that are in no group. With the matrices of
    one layer it is jax.lax.ragged_dot, but for the orientation of the matrices, which is that of checkpoints.
    """

    def __call__(
        self, x: jax.Array, matrices: jax.Array, counts: jax.Array, first: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array: ...


def choose(platform: str) -> GroupedMatmul:
    """The fastest that the platform ("cpu", "gpu", "tpu") has."""
    return tpu.grouped_matmul if platform == "tpu" else reference.grouped_matmul
