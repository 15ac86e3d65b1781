"""From logits to one token per row. A row's token depends on nothing but that row."""

from __future__ import annotations

from typing import Protocol

import jax

from noria.ops.sampling import cpu, xla
from noria.ops.sampling.types import SamplingRows

__all__ = ["BACKENDS", "Sample", "choose"]


class Sample(Protocol):
    """The signature that every implementation has.

    logits: f32 [R, V]; ids from num_tokens to V are padding and never sampled. banned: int32 [R, n], ids that a row may
    not get, V for none. rows: int32 scalar, the number of rows that count: the others get any id.

    Returns int32 [R]: NO_TOKEN for a row whose logits are not numbers, NOTHING_ALLOWED for one in which all are banned
    or minus infinity. Order of the filters: banned tokens, temperature, top-k, top-p (of what top-k left), min-p. What
    is drawn is a function of logits, key and position: the same on every back end but for the last bits of logarithms.
    """

    def __call__(
        self, logits: jax.Array, inputs: SamplingRows, banned: jax.Array, rows: jax.Array, *, num_tokens: int
    ) -> jax.Array: ...


BACKENDS: tuple[tuple[str, Sample], ...] = (("xla", xla.sample), ("native", cpu.sample))


def choose(linear_backend: str) -> Sample:
    """The implementation that goes with a linear back end."""
    return cpu.sample if linear_backend == "native" else xla.sample
