"""Log-probabilities of a token and of the likeliest ones, in integers that the host can read at once.

What is summed over the vocabulary is summed free of order (see sample.py), and the logarithm is left to the host: so
the figures of a row do not depend on how many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noria.ops.sampling.xla import order_free_sum

_FIXED = 3  # rank, logit of the token, sum; then ids and logits of the likeliest
LOWEST = (
    -9999.0
)  # in place of what is no number or minus infinity, which JSON does not have; vLLM's server says the same


def score(logits: jax.Array, token_ids: jax.Array, num_top: int) -> jax.Array:
    """logits [R, V] float32, masked where a token is excluded; token_ids [R].

    -> int32 [R, 3 + 2 * num_top]: rank of the token, 1 for the likeliest; the bits of its logit, with the largest
    subtracted; those of the sum of all exp(logit - largest); ids of the num_top likeliest, of equals the lowest first;
    the bits of theirs.
    """
    bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    # The barrier, because what is compared must be one and the same rounding.
    shifted = lax.optimization_barrier(logits - jnp.max(logits, axis=-1, keepdims=True))
    total = order_free_sum(jnp.exp(shifted))(True)
    chosen = jnp.take_along_axis(shifted, jnp.maximum(token_ids, 0)[:, None], axis=1)
    rank = 1 + jnp.sum(shifted > chosen, axis=-1, dtype=jnp.int32)
    columns = [rank[:, None], bits(chosen), bits(total)[:, None]]
    if num_top:
        values, ids = lax.top_k(shifted, num_top)
        columns += [ids.astype(jnp.int32), bits(values)]
    return jnp.concatenate(columns, axis=1)


def width(num_top: int) -> int:
    """Columns of what `score` yields."""
    return _FIXED + 2 * num_top


def read_scores(packed: np.ndarray, token_ids: list[int], num_top: list[int]) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """From what `score` yields, on the host: for each row (token id, log-probability, rank) of the token, then of the
    num_top[row] likeliest.

    Equals have the same rank: 1 and the number of tokens that are likelier.
    """
    most = (packed.shape[1] - _FIXED) // 2
    floats = packed.view(np.float32)
    for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True)):
        total = float(floats[row, 2])
        log_total = math.log(total) if total > 0 else math.nan
        news = [(token_id, _finite(float(floats[row, 1]) - log_total), int(packed[row, 0]))]
        ids = packed[row, _FIXED : _FIXED + count].tolist()
        values = floats[row, _FIXED + most : _FIXED + most + count].tolist()
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
