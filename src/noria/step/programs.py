"""The device programs of a step. Pure: (weights, cache, packed inputs) -> (cache, outputs), the cache donated.

The forward pass is compiled per token bucket and hands on the hidden states of max_num_seqs rows, whatever the bucket;
head and sampler are compiled per request bucket. The buckets add up instead of multiplying. A burst is both in a loop,
compiled per request bucket: see decode.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noria.batch.inputs import BatchShape, ForwardInputs, SampleInputs
from noria.cache.layout import CacheLayout
from noria.models.decoder import Decoder
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import (
    FULL_ATTENTION,
    KVCache,
    LayerAddress,
    RaggedBatch,
)
from noria.step.sample import all_plain_greedy, sample


@dataclass(frozen=True)
class StepPrograms:
    """What is fixed for the life of an engine; the methods are functions to jit."""

    model: Decoder
    shape: BatchShape
    layout: CacheLayout
    num_blocks: int  # rows of the cache array per layer slot
    num_valid_tokens: int  # size of the tokenizer's vocabulary; the model's may be padded
    ops: Ops

    def forward(self, weights: Any, cache: KVCache, sampled: jax.Array, packed: jax.Array) -> tuple[KVCache, jax.Array]:
        """sampled [max_num_seqs] int32: the tokens of the step before, which the host may not have seen yet.

        packed: int32, see ForwardInputs. -> cache, hidden states [max_num_seqs, E] of the rows to sample from.
        """
        num_tokens = ForwardInputs.num_tokens(packed.shape[0], self.shape)
        inputs = ForwardInputs.unpack(packed, self.shape, num_tokens)
        batch = RaggedBatch(
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            distribution=inputs.distribution,
        )
        token_ids = known_tokens(inputs, sampled)
        cache, hidden = self.run_model(weights, cache, token_ids, batch)
        return cache, hidden[inputs.logit_rows]

    def sample(self, weights: Any, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """hidden [max_num_seqs, E]; packed: int32, see SampleInputs, of R rows. -> token ids [max_num_seqs],
        of which the first R have a meaning."""
        inputs = unpack_sample_inputs(packed)
        token_ids = self.next_tokens(weights, hidden[: inputs.position.shape[0]], inputs)
        return jnp.pad(token_ids, (0, self.shape.num_rows - token_ids.shape[0]))

    def run_model(
        self, weights: Any, cache: KVCache, token_ids: jax.Array, batch: RaggedBatch
    ) -> tuple[KVCache, jax.Array]:
        """token_ids [T] -> cache, hidden states [T, E]."""
        hidden, cache = self.model.forward(weights, cache, token_ids, batch, self._addresses(), self.ops)
        return cache, hidden

    def next_tokens(self, weights: Any, hidden: jax.Array, inputs: SampleInputs) -> jax.Array:
        """hidden [R, E] -> token ids [R]."""
        num_rows = jnp.sum(inputs.num_steps > 0, dtype=jnp.int32)

        def choose(hidden: jax.Array) -> jax.Array:
            return sample(self.model.logits(weights, hidden, num_rows, self.ops), inputs, self.num_valid_tokens)

        def greedy(hidden: jax.Array) -> jax.Array:
            return self.model.greedy(weights, hidden, num_rows, self.num_valid_tokens, self.ops)

        if self.model.config.final_soft_cap is None:
            return lax.cond(all_plain_greedy(inputs), greedy, choose, hidden)
        # The cap makes large logits equal, so the first of them must be looked for after it.
        return choose(hidden)

    def _addresses(self) -> LayerAddress:
        """Where the layers' caches lie, as arrays [layers] that the layer scan carries along."""
        windows = [FULL_ATTENTION if window is None else window for window in self.model.config.windows]
        return LayerAddress(
            group=jnp.asarray(self.layout.layer_group, jnp.int32),
            offset=jnp.asarray(self.layout.layer_slot, jnp.int32) * self.num_blocks,
            window=jnp.asarray(windows, jnp.int32),
        )


def known_tokens(inputs: ForwardInputs, sampled: jax.Array) -> jax.Array:
    """Token ids [T]; those that the host did not know come from `sampled`."""
    known = inputs.token_sources < 0
    return jnp.where(known, inputs.token_ids, sampled[jnp.maximum(inputs.token_sources, 0)])


def unpack_sample_inputs(packed: jax.Array) -> SampleInputs:
    return SampleInputs.unpack(packed, lambda bits: lax.bitcast_convert_type(bits, jnp.float32))
