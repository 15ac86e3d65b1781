"""The device programs of a step. Pure: (weights, cache, packed inputs) -> (cache, outputs), the cache donated.

The forward pass is compiled per token bucket and hands on the hidden states of as many rows as a head pass can have,
whatever the bucket; head and sampler are compiled per request bucket. The buckets add up instead of multiplying. Drafts
are rows of the head pass like others: see verify.py. A burst is both in a loop,
compiled per request bucket: see decode.py. Steps in which a row has penalties or the like, or wants log-probabilities,
use another sampler, so that the others pay nothing for it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noria.batch.inputs import BatchShape, ForwardInputs, SampleInputs, ShapingInputs
from noria.cache.layout import CacheLayout
from noria.models.decoder import Decoder
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import (
    FULL_ATTENTION,
    KVCache,
    LayerAddress,
    RaggedBatch,
)
from noria.ops.sampling.types import score_width
from noria.ops.sampling.xla import mask_padding, scale_and_filter
from noria.step.sample import all_plain_greedy, count_rows, sample
from noria.step.shape import Tables, apply_mask, count, shape
from noria.step.verify import accept


@dataclass(frozen=True)
class StepPrograms:
    """What is fixed for the life of an engine; the methods are functions to jit."""

    model: Decoder
    shape: BatchShape
    layout: CacheLayout
    num_blocks: int  # rows of the cache array per layer slot
    num_valid_tokens: int  # size of the tokenizer's vocabulary; the model's may be padded
    ops: Ops
    max_logprobs: int = 20
    processed_logprobs: bool = False  # of what was sampled from, instead of the model's own
    wanted_states: tuple[int, ...] = ()  # by a draft head, see Decoder.forward_with_states

    def forward(
        self, weights: Any, cache: KVCache, sampled: jax.Array, packed: jax.Array
    ) -> tuple[KVCache, jax.Array, jax.Array, jax.Array | None]:
        """sampled [L] int32: the tokens of the step before, which the host may not have seen yet.

        packed: int32, see ForwardInputs.of_ranks. -> cache, hidden states [L, E] of the rows to sample from,
        those of all tokens [T, E], which are there anyway, and the wanted ones of all tokens; of all ranks.
        """
        inputs = ForwardInputs.of_ranks(packed, self.shape)
        token_ids = known_tokens(inputs, sampled)
        batch = ragged_batch(inputs, self.shape.num_ranks)
        cache, hidden, states = self.run_model(weights, cache, token_ids, batch)
        return cache, self.of_ranks(hidden, inputs.logit_rows), hidden, states

    def sample(self, weights: Any, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """hidden [L, E]; packed: int32, see SampleInputs.of_ranks, of R rows. -> token ids [L], of which the first R
        have a meaning: see `accept`."""
        inputs = unpack_sample_inputs(packed)
        token_ids = self.next_tokens(weights, self._first(hidden, inputs.position.shape[0]), inputs)
        return self._padded(self._accept(token_ids, inputs))

    def _accept(self, token_ids: jax.Array, inputs: SampleInputs) -> jax.Array:
        """accept, for each rank by itself, so that they need not wait for each other."""
        if (ranks := self.shape.num_ranks) == 1:
            return accept(token_ids, inputs)
        own = lambda tokens, draft, place: accept(tokens, dataclasses.replace(inputs, draft=draft, place=place))
        each = (array.reshape(ranks, -1) for array in (token_ids, inputs.draft, inputs.place))
        return jax.vmap(own)(*each).reshape(-1)

    def of_ranks(self, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """hidden [T, E]; rows: of each rank, counted from where its tokens begin."""
        ranks = self.shape.num_ranks
        if ranks == 1:
            return hidden[rows]
        parts, rows = hidden.reshape(ranks, -1, hidden.shape[1]), rows.reshape(ranks, -1, 1)
        return jnp.take_along_axis(parts, rows, axis=1, mode="clip").reshape(-1, hidden.shape[1])

    def _first(self, hidden: jax.Array, rows: int) -> jax.Array:
        """hidden [L, E] -> [rows, E]: the first of each rank."""
        ranks = self.shape.num_ranks
        if ranks == 1:
            return hidden[:rows]
        return hidden.reshape(ranks, -1, hidden.shape[1])[:, : rows // ranks].reshape(rows, -1)

    def _padded(self, token_ids: jax.Array) -> jax.Array:
        """To the places that `forward` takes tokens from, whatever the bucket."""
        return jnp.pad(token_ids, (0, self.shape.all_logit_rows - token_ids.shape[0]))

    def sample_shaped(
        self,
        weights: Any,
        hidden: jax.Array,
        tables: Tables,
        sampled: jax.Array,
        packed: jax.Array,
        packed_shaping: jax.Array,
        mask: jax.Array,
    ) -> tuple[Tables, jax.Array, jax.Array]:
        """In place of `sample` where a row asks for more, whose other rows get the same tokens from both.

        tables: donated. sampled: as of forward. packed_shaping: int32, see ShapingInputs. mask: see apply_mask.
        -> tables, token ids as of sample, and what the score op says of them [R, ...].
        """
        inputs, shaping = unpack_sample_inputs(packed), ShapingInputs.of_ranks(packed_shaping, _to_float)
        rows = inputs.position.shape[0]
        num_rows = self.rows_that_count(inputs)
        raw = self._logits(weights, self._first(hidden, rows), num_rows)
        logits = apply_mask(shape(raw, inputs, shaping, tables, sampled), mask)
        logits = lax.optimization_barrier(logits)
        none = jnp.zeros((rows, 0), jnp.int32)  # what is banned is masked
        chosen = self.ops.sampling.sample(logits, inputs, none, num_rows, num_tokens=logits.shape[1])
        token_ids = self._accept(chosen, inputs)

        def scored(raw: jax.Array, logits: jax.Array) -> jax.Array:
            if self.processed_logprobs:
                is_random = (inputs.temperature > 0)[:, None]
                raw = lax.optimization_barrier(jnp.where(is_random, scale_and_filter(logits, inputs), logits))
            return self.ops.sampling.score(raw, token_ids, num_rows, num_top=self.max_logprobs)

        nothing = lambda raw, logits: jnp.zeros((rows, score_width(self.max_logprobs)), jnp.int32)
        scores = lax.cond(jnp.any(shaping.scores == 1), scored, nothing, raw, logits)
        return count(tables, shaping, token_ids), self._padded(token_ids), scores

    def score_prompt(self, weights: Any, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """hidden [R, E]; packed int32 [2, R]: row 1 has the tokens that follow, -1 for padding. -> [R, ...], see
        the score op."""
        token_ids = packed[1]
        rows = jnp.sum(token_ids >= 0, dtype=jnp.int32)
        logits = self._logits(weights, hidden, rows)
        return self.ops.sampling.score(logits, token_ids, rows, num_top=self.max_logprobs)

    def _logits(self, weights: Any, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """[R, V], with vocabulary padding masked, computed once."""
        logits = self.model.logits(weights, hidden, num_rows, self.ops)
        return lax.optimization_barrier(mask_padding(logits, self.num_valid_tokens))

    def run_model(
        self, weights: Any, cache: KVCache, token_ids: jax.Array, batch: RaggedBatch
    ) -> tuple[KVCache, jax.Array, jax.Array | None]:
        """token_ids [T] -> cache, hidden states [T, E], and those that are wanted."""
        arguments = (weights, cache, token_ids, batch, self._addresses(), self.ops)
        if not self.wanted_states:
            hidden, cache = self.model.forward(*arguments)
            return cache, hidden, None
        hidden, cache, states = self.model.forward_with_states(*arguments, self.wanted_states)
        return cache, hidden, states

    def next_tokens(self, weights: Any, hidden: jax.Array, inputs: SampleInputs) -> jax.Array:
        """hidden [R, E] -> token ids [R]."""
        num_rows = self.rows_that_count(inputs)

        def choose(hidden: jax.Array) -> jax.Array:
            logits = self.model.logits(weights, hidden, num_rows, self.ops)
            return sample(logits, inputs, self.num_valid_tokens, self.ops.sampling)

        def greedy(hidden: jax.Array) -> jax.Array:
            return self.model.greedy(weights, hidden, num_rows, self.num_valid_tokens, self.ops)

        if self.model.config.final_soft_cap is None:
            return lax.cond(all_plain_greedy(inputs), greedy, choose, hidden)
        # The cap makes large logits equal, so the first of them must be looked for after it.
        return choose(hidden)

    def rows_that_count(self, inputs: SampleInputs) -> jax.Array:
        """The number of rows before the padding; of several ranks each has its own, and all count."""
        return count_rows(inputs) if self.shape.num_ranks == 1 else jnp.int32(inputs.num_steps.shape[0])

    def _addresses(self) -> LayerAddress:
        """Where the layers' caches lie, as arrays [layers] that the layer scan carries along."""
        windows = [FULL_ATTENTION if window is None else window for window in self.model.config.windows]
        return LayerAddress(
            group=jnp.asarray(self.layout.layer_group, jnp.int32),
            offset=jnp.asarray(self.layout.layer_slot, jnp.int32) * self.num_blocks,
            window=jnp.asarray(windows, jnp.int32),
        )


def ragged_batch(inputs: ForwardInputs, num_ranks: int = 1) -> RaggedBatch:
    return RaggedBatch(
        token_rows=inputs.token_rows,
        positions=inputs.positions,
        query_start=inputs.query_start,
        seq_lens=inputs.seq_lens,
        block_tables=inputs.block_tables,
        distribution=inputs.distribution,
        num_ranks=num_ranks,
    )


def known_tokens(inputs: ForwardInputs, sampled: jax.Array) -> jax.Array:
    """Token ids [T]; those that the host did not know come from `sampled`."""
    known = inputs.token_sources < 0
    return jnp.where(known, inputs.token_ids, sampled[jnp.maximum(inputs.token_sources, 0)])


def unpack_sample_inputs(packed: jax.Array) -> SampleInputs:
    return SampleInputs.of_ranks(packed, _to_float)


def _to_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def merge(hidden: jax.Array, other: jax.Array, owned: jax.Array) -> jax.Array:
    """Hidden states [L, E] of two passes of one step -> those of the second in the rows that it owns, bool [L]."""
    return jnp.where(owned[:, None], other, hidden)


def pick_rows(hidden: jax.Array, packed: jax.Array) -> jax.Array:
    """hidden [T, E] -> those that `score_prompt` takes."""
    return hidden[packed[0]]
