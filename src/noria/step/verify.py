"""Drafts against what the model samples: the tokens that count are those that come without drafts, too.

A request with k drafts has k + 1 rows in the head pass, and in each the token that follows is sampled exactly as it
would be there without drafts: from the same logits, with the noise of (request key, position). A draft is accepted when
it is that token. So a greedy request gets its greedy tokens. A random one gets draws from its own distribution: that of
a draft that is a single guess is accepted with the probability that the model gives it, which is what rejection
sampling would do (Leviathan et al. 2023); and the token in place of a wrong draft is distributed as the recovered token
there. But since no coin is thrown that a draft has a part in, the answer does not depend on the drafts at all: not on
who made them, how many there were, or whether there were any (Daliri et al. 2024, "Coupling without Communication and
Drafter-Invariant Speculative Decoding"). A draft model that draws with the same noise guesses right whenever both
distributions agree on the draw.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from noria.batch.inputs import NOT_SAMPLED, SampleInputs
from noria.speculative_config import MAX_SPECULATIVE_TOKENS


def accept(token_ids: jax.Array, inputs: SampleInputs) -> jax.Array:
    """token_ids [R], sampled in each row -> those that count; NOT_SAMPLED behind the first wrong draft of a request.

    Of the tokens of a request that count, the last one is in place of a wrong draft, or behind the last draft.
    """
    is_wrong = (token_ids != inputs.draft).astype(jnp.int32)
    wrong_before = jnp.cumsum(is_wrong) - is_wrong  # in all rows before, of whatever request
    first = jnp.arange(token_ids.shape[0]) - inputs.place
    return jnp.where(wrong_before == wrong_before[first], token_ids, NOT_SAMPLED)


def count_drafts(counts: jax.Array, inputs: SampleInputs) -> jax.Array:
    """counts [R, V], see Tables, as they were before the step -> with the drafts before each row counted."""

    def counted(counts: jax.Array) -> jax.Array:
        rows, vocab = counts.shape
        back = jnp.arange(1, MAX_SPECULATIVE_TOKENS + 1)
        before = jnp.maximum(jnp.arange(rows)[:, None] - back, 0)
        columns = jnp.where(back <= inputs.place[:, None], inputs.draft[before], vocab)
        return counts.at[jnp.arange(rows)[:, None], columns].add(2, mode="drop")

    return lax.cond(jnp.any(inputs.place > 0), counted, lambda counts: counts, counts)
