"""The device programs of a step. Pure: (weights, cache, packed inputs) -> (cache, outputs), the cache donated.

The forward pass is compiled per token bucket and hands on the hidden states of max_num_seqs rows, whatever the bucket;
head and sampler are compiled per request bucket. The buckets add up instead of multiplying.
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
        known = inputs.token_sources < 0
        token_ids = jnp.where(known, inputs.token_ids, sampled[jnp.maximum(inputs.token_sources, 0)])
        hidden, cache = self.model.forward(weights, cache, token_ids, batch, self._addresses(), self.ops)
        return cache, hidden[inputs.logit_rows]

    def sample(self, weights: Any, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """hidden [max_num_seqs, E]; packed: int32, see SampleInputs, of R rows. -> token ids [max_num_seqs],
        of which the first R have a meaning."""
        inputs = SampleInputs.unpack(packed, lambda bits: lax.bitcast_convert_type(bits, jnp.float32))
        num_rows = jnp.sum(inputs.position > 0, dtype=jnp.int32)  # no row samples its first token
        hidden = hidden[: inputs.position.shape[0]]

        def choose(hidden: jax.Array) -> jax.Array:
            return sample(self.model.logits(weights, hidden, num_rows, self.ops), inputs, self.num_valid_tokens)

        def greedy(hidden: jax.Array) -> jax.Array:
            return self.model.greedy(weights, hidden, num_rows, self.num_valid_tokens, self.ops)

        if self.model.config.final_soft_cap is None:
            token_ids = lax.cond(all_plain_greedy(inputs), greedy, choose, hidden)
        else:  # which makes large logits equal, so the first of them must be looked for after it
            token_ids = choose(hidden)
        return jnp.pad(token_ids, (0, self.shape.num_rows - token_ids.shape[0]))

    def _addresses(self) -> LayerAddress:
        """Where the layers' caches lie, as arrays [layers] that the layer scan carries along."""
        windows = [FULL_ATTENTION if window is None else window for window in self.model.config.windows]
        return LayerAddress(
            group=jnp.asarray(self.layout.layer_group, jnp.int32),
            offset=jnp.asarray(self.layout.layer_slot, jnp.int32) * self.num_blocks,
            window=jnp.asarray(windows, jnp.int32),
        )
