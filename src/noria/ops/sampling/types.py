"""What sampling works on, and what stands in place of a token where there is none."""

from __future__ import annotations

from typing import Any, Protocol

NO_TOKEN = -1  # the model's output is not a number
NOTHING_ALLOWED = -3  # every token is excluded
SCORE_COLUMNS = 3  # of a score: rank, logit of the token, sum; then ids and logits of the likeliest


def score_width(num_top: int) -> int:
    """All columns of a score."""
    return SCORE_COLUMNS + 2 * num_top


class SamplingRows(Protocol):
    """Arrays [R] of 32 bits, one value for each row."""

    @property
    def temperature(self) -> Any: ...  # float32; 0 is greedy

    @property
    def top_p(self) -> Any: ...  # float32

    @property
    def min_p(self) -> Any: ...  # float32

    @property
    def top_k(self) -> Any: ...  # int32; 0 for all

    @property
    def key_low(self) -> Any: ...  # int32 bits of the random key

    @property
    def key_high(self) -> Any: ...

    @property
    def position(self) -> Any: ...  # int32: of the token to be sampled
