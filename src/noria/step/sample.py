"""What a step asks of the sampling op: stop tokens that may not come yet, and whether there is anything to draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from noria.batch.inputs import SampleInputs
from noria.ops.sampling.api import Backend


def count_rows(inputs: SampleInputs) -> jax.Array:
    """Of those that are not padding, which come first."""
    return jnp.sum(inputs.num_steps > 0, dtype=jnp.int32)


def sample(logits: jax.Array, inputs: SampleInputs, num_tokens: int, op: Backend) -> jax.Array:
    """logits [R, V] -> token ids [R], see ops/sampling/api.py. Stop tokens are banned where min_tokens asks for it."""
    banned = stop_columns(inputs, logits.shape[1])
    return op.sample(logits, inputs, banned, count_rows(inputs), num_tokens=num_tokens)


def all_plain_greedy(inputs: SampleInputs) -> jax.Array:
    """Whether every row takes its largest logit and nothing is banned: a bool scalar."""
    return ~(jnp.any(inputs.temperature > 0) | jnp.any(_is_banned(inputs)))


def stop_columns(inputs: SampleInputs, vocab: int) -> jax.Array:
    """Ids that may not be sampled, V for none: the stop tokens of rows that have not reached min_tokens."""
    return jnp.where(_is_banned(inputs), inputs.stops, vocab)


def ends(token_ids: jax.Array, inputs: SampleInputs) -> jax.Array:
    """[R] bool: whether the tokens, sampled at inputs.position, end their rows: as stop tokens, or as none."""
    is_stop = jnp.any(_is_stop_id(inputs) & (inputs.stops == token_ids[:, None]), axis=1)
    return (is_stop & (inputs.position >= inputs.banned_until)) | (token_ids < 0)


def _is_stop_id(inputs: SampleInputs) -> jax.Array:
    """[R, MAX_STOPS] bool: false for the places of `stops` that hold nothing."""
    return jnp.arange(inputs.stops.shape[1]) < inputs.num_stops[:, None]


def _is_banned(inputs: SampleInputs) -> jax.Array:
    """[R, MAX_STOPS] bool: which places of `stops` hold a token that may not be sampled, for the sake of min_tokens."""
    return _is_stop_id(inputs) & (inputs.position < inputs.banned_until)[:, None]
