"""The sampling op in plain XLA: the contract, and what every device has.

Nothing is sorted: the k-th largest logit and the nucleus are thresholds, found by bisection over the bits of a float.
Each of the 32 rounds is one pass over the logits, where sorting a vocabulary of 262,144 takes far longer on any device,
and tokens that tie with the last one kept are all kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.sampling.types import NO_TOKEN, NOTHING_ALLOWED, SamplingRows

_MASKED = -jnp.inf


def sample(
    logits: jax.Array, inputs: SamplingRows, banned: jax.Array, rows: jax.Array, *, num_tokens: int
) -> jax.Array:
    """See api.py."""
    # XLA may compute a value twice, in two fusions that round differently. What is compared with itself must not be.
    logits = lax.optimization_barrier(ban(mask_padding(logits, num_tokens), banned))
    greedy = jnp.argmax(logits, axis=-1)
    is_random = inputs.temperature > 0

    def draw(logits: jax.Array) -> jax.Array:
        # The Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from softmax(logits).
        return jnp.argmax(scale_and_filter(logits, inputs) + _noise(inputs, logits.shape[1]), axis=-1)

    random = lax.cond(jnp.any(is_random), draw, lambda _: greedy, logits)
    # A NaN or an infinity among the logits says that the model's numbers went wrong: no token is right then.
    best = jnp.max(logits, axis=-1)
    none = jnp.where(best == _MASKED, NOTHING_ALLOWED, NO_TOKEN)
    return jnp.where(jnp.isfinite(best), jnp.where(is_random, random, greedy), none).astype(jnp.int32)


def score(logits: jax.Array, token_ids: jax.Array, rows: jax.Array, *, num_top: int) -> jax.Array:
    """See api.py."""
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


def scale_and_filter(logits: jax.Array, inputs: SamplingRows) -> jax.Array:
    """What random rows draw from: divided by the temperature, the largest logit 0, and what is filtered out masked."""
    is_random = inputs.temperature > 0
    # The subtraction makes the largest logit exactly 0 whatever the temperature: it can neither overflow nor be
    # filtered out.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = lax.optimization_barrier(scaled / jnp.where(is_random, inputs.temperature, 1.0)[:, None])
    filters = is_random & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))
    return lax.cond(jnp.any(filters), lambda x: _filter(x, inputs), lambda x: x, scaled)


def mask_padding(logits: jax.Array, num_tokens: int) -> jax.Array:
    return jnp.where(jnp.arange(logits.shape[1]) < num_tokens, logits, _MASKED)


def ban(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """columns [R, n]: token ids of each row to mask; V for none."""
    return logits.at[jnp.arange(logits.shape[0])[:, None], columns].set(_MASKED, mode="drop")


def _noise(inputs: SamplingRows, vocab: int) -> jax.Array:
    """Gumbel noise [R, V], a pure function of each row's (request key, token position)."""

    def row(low: jax.Array, high: jax.Array, position: jax.Array) -> jax.Array:
        words = lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(inputs.key_low, inputs.key_high, inputs.position)


def _filter(logits: jax.Array, inputs: SamplingRows) -> jax.Array:
    """logits [R, V] with a maximum of 0 -> the same with what top-k, top-p and min-p exclude masked."""
    k = jnp.where(inputs.top_k > 0, inputs.top_k, logits.shape[1])
    floor = _largest_key(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)
    logits = jnp.where(_sortable(logits) >= floor[:, None], logits, _MASKED)

    total = order_free_sum(jnp.exp(logits))
    nucleus = inputs.top_p * total(True)
    floor = _largest_key(logits, lambda kept: total(kept) >= nucleus)
    floor = jnp.minimum(floor, _sortable(jnp.float32(0)))  # the largest logit stays, even for a top_p that underflows
    limited = (inputs.top_p < 1)[:, None] & (_sortable(logits) < floor[:, None])
    logits = jnp.where(limited, _MASKED, logits)

    # The largest logit is 0, so exp(logit) is the probability relative to the largest.
    floor = jnp.minimum(jnp.log(inputs.min_p), 0)
    return jnp.where(logits < floor[:, None], _MASKED, logits)


def order_free_sum(weights: jax.Array) -> Callable[[jax.Array | bool], jax.Array]:
    """weights [R, V], each 0 to 1 -> a function: kept [R, V] bool -> float32 [R], the sum of the weights kept.

    Floats summed in another order give another sum, and XLA's order depends on the number of rows. So each weight
    becomes three integers of 13 bits, which sum to the same in any order. 2**19 of them fit, and their sum is right to
    the 20th bit behind the point even when all the tokens of so large a vocabulary are rounded down.
    """
    parts, rest = [], weights
    for _ in range(3):
        digits = jnp.floor(rest * 2.0**13)
        parts.append(digits.astype(jnp.uint32))
        rest = rest * 2.0**13 - digits

    def total(kept: jax.Array | bool) -> jax.Array:
        value = jnp.zeros(weights.shape[:1], jnp.float32)
        for part in reversed(parts):
            value = (value + jnp.sum(jnp.where(kept, part, 0), axis=-1).astype(jnp.float32)) * 2.0**-13
        return value

    return total


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 keys in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[R] uint32: the largest key such that what lies at or above it is still enough.

    enough: kept [R, V] bool -> [R] bool, true for everything, and monotone in the set kept.
    """
    keys = _sortable(logits)

    def set_bit(index: jax.Array, floor: jax.Array) -> jax.Array:
        candidate = floor | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(enough(keys >= candidate[:, None]), candidate, floor)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(logits.shape[0], jnp.uint32))
