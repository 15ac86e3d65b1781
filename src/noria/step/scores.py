"""What the host makes of the scores of tokens: log-probabilities and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from noria.ops.sampling.types import SCORE_COLUMNS

LOWEST = (
    -9999.0
)  # in place of what is no number or minus infinity, which JSON does not have; vLLM's server says the same


def read_scores(packed: np.ndarray, token_ids: list[int], num_top: list[int]) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """From what the score op yields, on the host: for each row (token id, log-probability, rank) of the token, then of
    the num_top[row] likeliest.

    Equals have the same rank: 1 and the number of tokens that are likelier.
    """
    most = (packed.shape[1] - SCORE_COLUMNS) // 2
    floats = packed.view(np.float32)
    for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True)):
        total = float(floats[row, 2])
        log_total = math.log(total) if total > 0 else math.nan
        news = [(token_id, _finite(float(floats[row, 1]) - log_total), int(packed[row, 0]))]
        ids = packed[row, SCORE_COLUMNS : SCORE_COLUMNS + count].tolist()
        values = floats[row, SCORE_COLUMNS + most : SCORE_COLUMNS + most + count].tolist()
        rank = 1
        for place, (top_id, value) in enumerate(zip(ids, values)):
            if not math.isfinite(value):
                break  # what follows is excluded, too
            if place and value < values[place - 1]:
                rank = place + 1
            news.append((top_id, _finite(value - log_total), rank))
        yield tuple(news)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
