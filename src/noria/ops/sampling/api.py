"""From logits to one token per row, and what the logits say of it. A row depends on nothing but itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from noria.ops.sampling import cpu, xla
from noria.ops.sampling.types import SamplingRows

__all__ = ["BACKENDS", "Backend", "Sample", "Score", "choose"]


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


class Score(Protocol):
    """What the model thinks of a token of each row, in integers that the host can read at once.

    logits: f32 [R, V], minus infinity where a token is excluded. token_ids: int32 [R]; of a negative one nothing is
    said that means anything. rows: as of Sample.

    Returns int32 [R, 3 + 2 * num_top]: the token's rank, 1 for the likeliest; the bits of its logit, with the largest
    subtracted; those of the sum of all exp(logit - largest); ids of the num_top likeliest, of equals the lowest first;
    the bits of theirs. The sum is free of order and the logarithm is left to the host: so the figures of a row do not
    depend on how many rows there are.
    """

    def __call__(self, logits: jax.Array, token_ids: jax.Array, rows: jax.Array, *, num_top: int) -> jax.Array: ...


@dataclass(frozen=True)
class Backend:
    name: str
    sample: Sample
    score: Score


BACKENDS: tuple[Backend, ...] = (
    Backend("xla", xla.sample, xla.score),
    Backend("native", cpu.sample, cpu.score),
)


def choose(linear_backend: str) -> Backend:
    """The implementation that goes with a linear back end."""
    return BACKENDS[linear_backend == "native"]
