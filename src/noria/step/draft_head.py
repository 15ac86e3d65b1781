"""The device programs of a draft head (EAGLE-3): to follow the model, and to draft.

The head has the cache of one more layer, with the block tables of the model: in the place of the token at position p it
keeps what it made of the model's hidden states there and of the token at p + 1. So it follows each step as soon as the
tokens are sampled; what it wrote behind a wrong draft is overwritten with it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.batch.inputs import NOT_SAMPLED, ForwardInputs, HeadInputs, SampleInputs
from noria.models.eagle3 import Eagle3Head, HeadWeights
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import KVCache, LayerAddress, RaggedBatch
from noria.step.programs import StepPrograms, ragged_batch, unpack_sample_inputs
from noria.step.sample import all_plain_greedy, sample


@tree_util.register_dataclass
@dataclass(frozen=True)
class HeadState:
    """What the head keeps from step to step."""

    cache: KVCache
    hidden: jax.Array  # [ranks, rows, E]: by row of each rank, what it yielded at the last token computed


@tree_util.register_dataclass
@dataclass(frozen=True)
class _Drafting:
    head: HeadState
    hidden: jax.Array  # [R, E] behind the last draft
    tokens: jax.Array  # [most drafts, R]
    count: jax.Array  # int32: drafts made


@dataclass(frozen=True)
class HeadPrograms:
    """follow and draft are functions to jit; the first is compiled per token bucket, the other per request bucket."""

    head: Eagle3Head
    steps: StepPrograms
    ops: Ops  # of the head; how the model is split, whose embedding it has, may be another way
    group: int  # cache group whose block tables the head shares
    window: int  # how far it sees
    max_drafts: int

    def follow(
        self,
        embedding: Any,
        weights: HeadWeights,
        state: HeadState,
        states: jax.Array,
        sampled: jax.Array,
        forward: jax.Array,
        packed: jax.Array,
    ) -> tuple[HeadState, jax.Array]:
        """After a step. embedding: the model's. states: the wanted ones of the step's tokens. sampled: [L], by this
        step. forward: packed ForwardInputs. packed: HeadInputs. state is donated.

        -> state, and the number of rows that went on, by which the host sees that the program has ended.
        """
        shape = self.steps.shape
        inputs = ForwardInputs.of_ranks(forward, shape)
        head = HeadInputs.unpack(packed, shape, inputs.token_ids.shape[0] // shape.num_ranks)
        next_ids, sources = head.next_ids.reshape(-1), head.next_sources.reshape(-1)
        token_ids = jnp.where(sources < 0, next_ids, sampled[jnp.maximum(sources, 0)])
        batch = ragged_batch(inputs, shape.num_ranks)
        hidden, cache = self._run(embedding, weights, state.cache, states, token_ids, batch)
        # The last token of a request that counts says where it stands; of a chunk of a prompt it is the last.
        rows = head.state_rows.reshape(shape.num_ranks, -1)
        came = self.steps.of_ranks(token_ids[:, None] != NOT_SAMPLED, inputs.logit_rows).reshape(rows.shape)
        goes_on = (rows[:, 1:] == rows[:, :-1]) & came[:, 1:]
        is_last = came & ~jnp.pad(goes_on, ((0, 0), (0, 1)))
        rows = jnp.where(is_last, rows, shape.num_rows)
        state = HeadState(cache, _put(state.hidden, rows, self.steps.of_ranks(hidden, inputs.logit_rows)))
        return state, jnp.sum(rows < shape.num_rows, dtype=jnp.int32)

    def follow_one(
        self,
        embedding: Any,
        weights: HeadWeights,
        state: HeadState | None,
        states: jax.Array | None,
        token_ids: jax.Array,
        batch: RaggedBatch,
        seq_lens: jax.Array,
        rows: jax.Array | None,
    ) -> HeadState:
        """The same for a pass with one token for each row. token_ids [R]: the tokens that follow. seq_lens [R]: 0 for
        rows that take no part. rows: R in all, as of DraftInputs."""
        assert state is not None
        assert states is not None
        assert rows is not None
        hidden, cache = self._run(embedding, weights, state.cache, states, token_ids, batch)
        shape = self.steps.shape
        rows = jnp.where(seq_lens > 0, rows.reshape(-1), shape.num_rows).reshape(shape.num_ranks, -1)
        return HeadState(cache, _put(state.hidden, rows, hidden))

    def draft(
        self,
        embedding: Any,
        weights: HeadWeights,
        state: HeadState,
        forward: jax.Array,
        sample: jax.Array,
        rows: jax.Array,
    ) -> tuple[HeadState, jax.Array]:
        """Drafts for requests whose tokens are all known: num_steps of each row of `sample`, at `position` and behind.

        forward: packed ForwardInputs, of which the block tables count. rows: R in all, as of DraftInputs. state is
        donated. -> state, and drafts [max_drafts, R], NOT_SAMPLED behind the last of a row.
        """
        inputs, shape = unpack_sample_inputs(sample), self.steps.shape
        first = ForwardInputs.of_ranks(forward, shape)
        hidden = _take(state.hidden, jnp.minimum(rows, shape.num_rows - 1).reshape(shape.num_ranks, -1))
        tokens = jnp.full((self.max_drafts, hidden.shape[0]), NOT_SAMPLED, jnp.int32)
        start = _Drafting(state, hidden, tokens.at[0].set(self._choose(weights, hidden, inputs, 0)), jnp.int32(1))

        def one_pass(drafting: _Drafting) -> _Drafting:
            count = drafting.count
            # The newest token is at position + count - 1, and what is made of it has the place before.
            lens = jnp.where(count < inputs.num_steps, inputs.position + count - 1, 0)
            token_ids = drafting.tokens[count - 1]
            batch = one_token_each(first, lens, shape.num_ranks)
            hidden, cache = self._step(embedding, weights, drafting.head.cache, drafting.hidden, token_ids, batch)
            drawn = self._choose(weights, hidden, inputs, count)
            head = dataclasses.replace(drafting.head, cache=cache)
            return _Drafting(head, hidden, drafting.tokens.at[count].set(drawn), count + 1)

        most = jnp.max(inputs.num_steps)
        drafting = lax.while_loop(lambda drafting: drafting.count < most, one_pass, start)
        return drafting.head, drafting.tokens

    def _choose(
        self, weights: HeadWeights, hidden: jax.Array, inputs: SampleInputs, count: jax.Array | int
    ) -> jax.Array:
        """The draft behind `count` others, drawn as the model draws; NOT_SAMPLED for rows that want no more."""
        alive = count < inputs.num_steps
        inputs = dataclasses.replace(inputs, position=inputs.position + count)
        num_rows = self.steps.rows_that_count(inputs)
        ops, vocab = self.ops, self.steps.model.config.vocab_size

        def draw(hidden: jax.Array) -> jax.Array:
            logits = self.head.logits(weights, hidden, num_rows, vocab, ops)
            return sample(logits, inputs, self.steps.num_valid_tokens, ops.sampling)

        greedy = lambda hidden: self.head.greedy(weights, hidden, num_rows, ops)
        return jnp.where(alive, lax.cond(all_plain_greedy(inputs), greedy, draw, hidden), NOT_SAMPLED)

    def _run(
        self,
        embedding: Any,
        weights: HeadWeights,
        cache: KVCache,
        states: jax.Array,
        token_ids: jax.Array,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, KVCache]:
        """states [T, ., E]: of the model."""
        fused = self.head.fuse(weights, states, batch.num_tokens, self.ops)
        return self._step(embedding, weights, cache, fused, token_ids, batch)

    def _step(
        self,
        embedding: Any,
        weights: HeadWeights,
        cache: KVCache,
        hidden: jax.Array,
        token_ids: jax.Array,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, KVCache]:
        embedded = self.steps.ops.linear.embed(embedding, jnp.maximum(token_ids, 0), hidden.dtype)
        address = LayerAddress(jnp.int32(self.group), jnp.int32(0), jnp.int32(self.window))
        return self.head.forward(weights, cache, embedded, hidden, batch, address, self.ops)


def _put(kept: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """kept: as of HeadState. rows [ranks, R]: of each rank; others than it has are left out. values [ranks * R, E]."""
    put = lambda kept, rows, values: kept.at[rows].set(values, mode="drop")
    return jax.vmap(put)(kept, rows, values.reshape(*rows.shape, -1))


def _take(kept: jax.Array, rows: jax.Array) -> jax.Array:
    """The same back: [ranks * R, E]."""
    return jax.vmap(lambda kept, rows: kept[rows])(kept, rows).reshape(rows.size, -1)


def one_token_each(first: ForwardInputs, seq_lens: jax.Array, num_ranks: int = 1) -> RaggedBatch:
    """The batch in which each of R rows computes its last token. seq_lens [R]: 0 for rows that take no part.

    first: of the first such pass, with the block tables of all of them.
    """
    rows, padding = seq_lens.shape[0] // num_ranks, first.seq_lens.shape[0] // num_ranks  # of a rank
    own_rows = jnp.arange(rows, dtype=jnp.int32)
    padded = lambda lens: jnp.pad(lens, (0, padding - rows))
    by_rank = lambda lens: jax.vmap(padded)(lens.reshape(num_ranks, -1)).reshape(-1)
    return RaggedBatch(
        token_rows=jnp.where(seq_lens > 0, own_rows if num_ranks == 1 else jnp.tile(own_rows, num_ranks), padding),
        positions=jnp.maximum(seq_lens - 1, 0),
        query_start=first.query_start,
        seq_lens=padded(seq_lens) if num_ranks == 1 else by_rank(seq_lens),
        block_tables=first.block_tables,
        distribution=first.distribution,
        num_ranks=num_ranks,
    )
