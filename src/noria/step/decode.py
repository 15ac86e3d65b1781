"""A burst: several forward passes in which every row decodes, as one loop on the device.

With a draft head each pass also brings the head's cache up to date, so that it is always as long as the model's.

A row leaves the loop when it has the tokens it was scheduled for or when a token ends it, and is padding from then on:
it belongs to no row of the attention op and writes to the null block. The loop ends with the last row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.batch.inputs import NOT_SAMPLED, ForwardInputs, SampleInputs
from noria.ops.ragged_paged_attention.api import KVCache
from noria.step.draft_head import HeadPrograms, HeadState, one_token_each
from noria.step.programs import StepPrograms, known_tokens, unpack_sample_inputs
from noria.step.sample import ends


@tree_util.register_dataclass
@dataclass(frozen=True)
class _Burst:
    """What a forward pass leaves to the next one; R rows of the request bucket."""

    step: jax.Array  # int32: forward passes made
    cache: KVCache
    newest: jax.Array  # [R] int32: last token of each row
    alive: jax.Array  # [R] bool: whether the row takes part in the next pass
    tokens: jax.Array  # [most passes, R] int32: what was sampled
    head: HeadState | None


@dataclass(frozen=True)
class DecodeProgram:
    """A function to jit, compiled per request bucket; the number of passes is known at run time only."""

    steps: StepPrograms
    max_steps: int  # at least num_scheduler_steps
    head: HeadPrograms | None = None

    def decode(
        self,
        weights: Any,
        cache: KVCache,
        sampled: jax.Array,
        forward: jax.Array,
        sample: jax.Array,
        head: HeadState | None = None,
        head_weights: Any = None,
        head_rows: jax.Array | None = None,
    ) -> tuple[KVCache, jax.Array, jax.Array, HeadState | None]:
        """sampled: as of StepPrograms.forward. forward: packed ForwardInputs of the first pass, one token per row,
        as many tokens as the request bucket has rows. sample: packed SampleInputs. head, head_weights, head_rows: of
        the draft head, see HeadPrograms.follow_one; None without.

        -> cache, the newest token of each row [L], and all tokens [max_steps, max_num_seqs], where
        NOT_SAMPLED stands for those of later passes than the row's last, and head.
        """
        inputs = unpack_sample_inputs(sample)
        rows = inputs.position.shape[0]
        first = ForwardInputs.of_ranks(forward, self.steps.shape)
        newest = known_tokens(first, sampled)
        # A token that the host has not seen may have ended its row in the step before.
        before = dataclasses.replace(inputs, position=inputs.position - 1)
        over = (first.token_sources >= 0) & ends(newest, before)
        start = _Burst(
            step=jnp.int32(0),
            cache=cache,
            newest=newest,
            alive=(inputs.num_steps > 0) & ~over,
            tokens=jnp.full((self.max_steps, rows), NOT_SAMPLED, jnp.int32),
            head=head,
        )

        def one_pass(burst: _Burst) -> _Burst:
            """One step, as the forward and the sample program make it."""
            now = dataclasses.replace(inputs, position=inputs.position + burst.step)
            lens = jnp.where(burst.alive, now.position, 0)  # with the token computed now
            batch = one_token_each(first, lens, self.steps.shape.num_ranks)
            cache, hidden, states = self.steps.run_model(weights, burst.cache, burst.newest, batch)
            after = self._sample(weights, hidden, now, dataclasses.replace(burst, cache=cache))
            if self.head is None:
                return after
            followed = self.head.follow_one(
                weights.embedding, head_weights, after.head, states, after.newest, batch, lens, head_rows
            )
            return dataclasses.replace(after, head=followed)

        burst = lax.while_loop(lambda burst: jnp.any(burst.alive), one_pass, start)
        shape = self.steps.shape
        pad = ((0, 0), (0, shape.all_rows - rows))
        tokens = jnp.pad(burst.tokens, pad, constant_values=NOT_SAMPLED)
        return burst.cache, jnp.pad(burst.newest, (0, shape.all_logit_rows - rows)), tokens, burst.head

    def _sample(self, weights: Any, hidden: jax.Array, inputs: SampleInputs, burst: _Burst) -> _Burst:
        """hidden: [R, E] of this pass."""
        alive, step = burst.alive, burst.step
        drawn = self.steps.next_tokens(weights, hidden, inputs)
        return dataclasses.replace(
            burst,
            step=step + 1,
            newest=jnp.where(alive, drawn, burst.newest),
            alive=alive & (step + 1 < inputs.num_steps) & ~ends(drawn, inputs),
            tokens=burst.tokens.at[step].set(jnp.where(alive, drawn, NOT_SAMPLED)),
        )
