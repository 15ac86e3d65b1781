"""The decoder-only transformer that all families so far are settings of.

The weights of all layers are stacked and scanned: a step has tens of arguments instead of thousands, and compile time
does not grow with depth. What differs between layers (window, rope, place in the cache) rides along as scanned arrays;
layers with an MLP and layers with experts are two scans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.models import experts, mla
from noria.models.config import DecoderConfig
from noria.models.experts import MoeWeights
from noria.models.mla import MlaWeights
from noria.nn.param import Param
from noria.nn.rope import rope_tables
from noria.ops.backends import Ops
from noria.ops.linear.reference import normalized
from noria.ops.ragged_paged_attention.api import KVCache, LayerAddress, RaggedBatch
from noria.ops.rms_norm import RmsNorm

Leaf = Any  # a Param in a declaration, an array in loaded weights


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """Each [layers, size]. None where the family has no such norm."""

    attention: Leaf
    q: Leaf
    k: Leaf
    attention_post: Leaf
    mlp: Leaf
    mlp_post: Leaf


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """Weights of the linear op that hold all layers, and biases [layers, out] or None.

    q, k, v and o are None where attention is latent; gate, up and down have the layers with an MLP, which come first,
    and are None where there are none.
    """

    q: Leaf
    k: Leaf
    v: Leaf
    o: Leaf
    gate: Leaf
    up: Leaf
    down: Leaf
    q_bias: Leaf
    k_bias: Leaf
    v_bias: Leaf
    o_bias: Leaf
    gate_bias: Leaf
    up_bias: Leaf
    down_bias: Leaf


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    embedding: Leaf  # [V, E]
    norms: LayerNorms
    matrices: LayerMatrices
    mla: MlaWeights | None
    experts: MoeWeights | None
    final_norm: Leaf  # [E]
    head: Leaf  # [V, E]; None when tied to the embedding


class Decoder:
    """A model without its weights: what they look like, and the pure functions that use them."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def declaration(self) -> DecoderWeights:
        """The weights as Params."""
        c = self.config
        vocab = ((c.vocab_size, c.hidden_size), ("vocab", "embed"))
        return DecoderWeights(
            embedding=Param(*vocab, source="model.embed_tokens.weight", matrix=True),
            norms=self._norms(),
            matrices=self._matrices(),
            mla=None if c.mla is None else mla.declare(c, c.mla),
            experts=None if c.moe is None else experts.declare(c, c.moe),
            final_norm=Param((c.hidden_size,), ("embed",), "model.norm.weight", init=self._norm_init),
            head=None if c.tie_word_embeddings else Param(*vocab, source="lm_head.weight", matrix=True),
        )

    @property
    def _norm_init(self) -> Any:
        return "zeros" if self.config.norm_offset else "ones"

    def _norms(self) -> LayerNorms:
        c = self.config

        def norm(name: str, exists: bool = True, size: int = c.hidden_size, axis: str = "embed") -> Param | None:
            return _layer_param(c.num_layers, name, (size,), (axis,), init=self._norm_init) if exists else None

        return LayerNorms(
            attention=norm("input_layernorm.weight"),
            q=norm("self_attn.q_norm.weight", c.qk_norm, c.head_dim, "head_dim"),
            k=norm("self_attn.k_norm.weight", c.qk_norm, c.head_dim, "head_dim"),
            attention_post=norm("post_attention_layernorm.weight", c.post_norms),
            mlp=norm(("pre_feedforward" if c.post_norms else "post_attention") + "_layernorm.weight"),
            mlp_post=norm("post_feedforward_layernorm.weight", c.post_norms),
        )

    def _matrices(self) -> LayerMatrices:
        c = self.config
        sizes = {
            "embed": c.hidden_size,
            "heads": c.num_heads * c.head_dim,
            "kv_heads": c.num_kv_heads * c.head_dim,
            "mlp": c.intermediate_size,
        }

        def matrix(name: str, out: str, into: str, layers: int = c.num_layers) -> Param | None:
            shape = sizes[out], sizes[into]
            return _layer_param(layers, name + ".weight", shape, (out, into), matrix=True) if layers else None

        own = partial(matrix, layers=c.num_layers if c.mla is None else 0)
        dense = partial(matrix, layers=c.num_dense_layers)

        def bias(name: str, out: str, exists: bool) -> Param | None:
            return _layer_param(c.num_layers, name + ".bias", (sizes[out],), (out,), init="zeros") if exists else None

        return LayerMatrices(
            q=own("self_attn.q_proj", "heads", "embed"),
            k=own("self_attn.k_proj", "kv_heads", "embed"),
            v=own("self_attn.v_proj", "kv_heads", "embed"),
            o=own("self_attn.o_proj", "embed", "heads"),
            gate=dense("mlp.gate_proj", "mlp", "embed"),
            up=dense("mlp.up_proj", "mlp", "embed"),
            down=dense("mlp.down_proj", "embed", "mlp"),
            q_bias=bias("self_attn.q_proj", "heads", c.qkv_bias),
            k_bias=bias("self_attn.k_proj", "kv_heads", c.qkv_bias),
            v_bias=bias("self_attn.v_proj", "kv_heads", c.qkv_bias),
            o_bias=bias("self_attn.o_proj", "embed", c.output_bias),
            gate_bias=bias("mlp.gate_proj", "mlp", c.mlp_bias),
            up_bias=bias("mlp.up_proj", "mlp", c.mlp_bias),
            down_bias=bias("mlp.down_proj", "embed", c.mlp_bias),
        )

    def forward(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        token_ids: jax.Array,
        batch: RaggedBatch,
        addresses: LayerAddress,
        ops: Ops,
    ) -> tuple[jax.Array, KVCache]:
        """token_ids [T]; addresses: LayerAddress of arrays [layers]. -> hidden states [T, E] before the final norm."""
        x, cache, _ = self.forward_with_states(weights, cache, token_ids, batch, addresses, ops, ())
        return x, cache

    def forward_with_states(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        token_ids: jax.Array,
        batch: RaggedBatch,
        addresses: LayerAddress,
        ops: Ops,
        wanted: tuple[int, ...],
    ) -> tuple[jax.Array, KVCache, jax.Array | None]:
        """As forward, and the hidden states of all tokens behind the first so many layers: [T, wanted, E].

        wanted: numbers of layers, 0 (the embedding) to all of them. None for the states where it is empty.
        """
        c = self.config
        x = ops.linear.embed(weights.embedding, token_ids, weights.final_norm.dtype)
        x = x * jnp.asarray(c.embedding_scale, x.dtype)
        num_tokens = batch.num_tokens  # the rest is padding
        cos, sin = rope_tables(c.ropes, batch.positions)  # [ropes, T, head_dim / 2]

        # Layers whose input nobody wants write to a place behind the others: a copy, where a condition would cost more.
        states = jnp.zeros((len(wanted) + 1, *x.shape), x.dtype) if wanted else None
        places = [wanted.index(layer) if layer in wanted else len(wanted) for layer in range(c.num_layers)]
        places = jnp.asarray(places, jnp.int32) if wanted else None

        def layer(
            has_experts: bool, carry: tuple[jax.Array, KVCache, Any], scanned: tuple
        ) -> tuple[tuple[jax.Array, KVCache, Any], None]:
            x, cache, states = carry
            index, address, rope, place = scanned
            states = None if states is None else states.at[place].set(x)
            linear = partial(ops.linear.linear, layer=index, rows=num_tokens)
            turn = partial(ops.rotary, cos=cos, sin=sin, rope=rope, layer=index, rows=num_tokens)
            attend = partial(ops.attention, batch=batch, layer=address)
            if c.mla is None or weights.mla is None:
                x, cache = self._attention(weights, x, cache, linear, turn, attend)
            else:
                norm = self._norm(weights.norms.attention)
                x, cache = mla.attention(c, c.mla, weights.mla, norm, x, cache, index, linear, turn, attend)
            x = self._mixture(weights, x, index, num_tokens, ops) if has_experts else self._mlp(weights, x, linear)
            return (x, cache, states), None

        layers = jnp.arange(c.num_layers, dtype=jnp.int32)
        scanned = (layers, addresses, jnp.asarray(c.layer_rope, jnp.int32), places)
        for has_experts, start, stop in ((False, 0, c.num_dense_layers), (True, c.num_dense_layers, c.num_layers)):
            if start < stop:
                these = jax.tree.map(itemgetter(slice(start, stop)), scanned)
                (x, cache, states), _ = lax.scan(partial(layer, has_experts), (x, cache, states), these)
        if states is None:
            return x, cache, None
        if c.num_layers in wanted:
            states = states.at[wanted.index(c.num_layers)].set(x)
        return x, cache, jnp.swapaxes(states[: len(wanted)], 0, 1)

    def logits(self, weights: DecoderWeights, hidden: jax.Array, num_rows: jax.Array, ops: Ops) -> jax.Array:
        """hidden [R, E], as forward returns it -> float32 logits [R, V], with a meaning in the first num_rows rows."""
        (logits,) = ops.linear.linear(
            hidden,
            (self._head(weights),),
            jnp.int32(0),
            num_rows,
            norm=self._norm(weights.final_norm[None]),
            out_dtype=jnp.dtype(jnp.float32),
        )
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def greedy(
        self, weights: DecoderWeights, hidden: jax.Array, num_rows: jax.Array, num_tokens: int, ops: Ops
    ) -> jax.Array:
        """The token ids [R] below num_tokens with the largest logits, without the logits; -1 where they are not finite.

        For models without a final soft cap.
        """
        norm = self._norm(weights.final_norm[None])
        return ops.linear.argmax(hidden, self._head(weights), num_rows, num_choices=num_tokens, norm=norm)

    def _head(self, weights: DecoderWeights) -> Leaf:
        return weights.embedding if weights.head is None else weights.head

    def _norm(self, weight: Leaf) -> RmsNorm | None:
        """weight: [layers, size], or None where there is no norm."""
        return None if weight is None else RmsNorm(weight, self.config.norm_epsilon, self.config.norm_offset)

    def _attention(
        self,
        weights: DecoderWeights,
        x: jax.Array,  # [T, E]
        cache: KVCache,
        linear: Callable[..., tuple[jax.Array, ...]],
        turn: Callable[..., tuple[jax.Array, jax.Array]],
        attend: Callable[..., tuple[jax.Array, KVCache]],
    ) -> tuple[jax.Array, KVCache]:
        c, m, n, tokens = self.config, weights.matrices, weights.norms, x.shape[0]
        biases = (m.q_bias, m.k_bias, m.v_bias)
        projected = linear(x, (m.q, m.k, m.v), biases=biases, norm=self._norm(n.attention))
        q, k, v = (y.reshape(tokens, -1, c.head_dim) for y in projected)
        q, k = turn(q, k, q_norm=self._norm(n.q), k_norm=self._norm(n.k))
        out, cache = attend(q, k, v, cache, scale=c.attention_scale, soft_cap=c.attention_soft_cap)
        out = out.reshape(tokens, -1)
        (x,) = linear(out, (m.o,), biases=(m.o_bias,), post_norm=self._norm(n.attention_post), residual=x)
        return x, cache

    def _mlp(self, weights: DecoderWeights, x: jax.Array, linear: Callable[..., tuple[jax.Array, ...]]) -> jax.Array:
        m, n = weights.matrices, weights.norms
        (gated,) = linear(
            x,
            (m.gate, m.up),
            biases=(m.gate_bias, m.up_bias),
            activation=self.config.activation,
            norm=self._norm(n.mlp),
        )
        (x,) = linear(gated, (m.down,), biases=(m.down_bias,), post_norm=self._norm(n.mlp_post), residual=x)
        return x

    def _mixture(self, weights: DecoderWeights, x: jax.Array, layer: jax.Array, rows: jax.Array, ops: Ops) -> jax.Array:
        c, norm = self.config, self._norm(weights.norms.mlp)
        assert c.moe is not None
        assert weights.experts is not None
        normed = normalized(x, norm, layer)
        y = experts.mixture(c, c.moe, weights.experts, normed, layer, rows, ops)
        return (x.astype(jnp.float32) + y).astype(x.dtype)


def _layer_param(num_layers: int, source: str, sizes: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> Param:
    return Param((num_layers, *sizes), ("layers", *axes), "model.layers.{layer}." + source, **options)
