"""The dense decoder-only transformer that all families so far are settings of.

The weights of all layers are stacked and scanned: a step has tens of arguments instead of thousands, and compile time
does not grow with depth. What differs between layers (window, rope, place in the cache) rides along as scanned arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.models.config import DecoderConfig
from noria.nn.linear import embed, linear
from noria.nn.norm import rms_norm
from noria.nn.param import Param
from noria.nn.rope import rope_tables, rotate
from noria.ops.ragged_paged_attention.api import KVCache, LayerAddress, RaggedBatch, RaggedPagedAttention

Leaf = Any  # a Param in a declaration, an array in loaded weights


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Each leaf has the leading axis "layers". None where the family has no such weight."""

    input_norm: Leaf
    q: Leaf
    k: Leaf
    v: Leaf
    o: Leaf
    q_bias: Leaf
    k_bias: Leaf
    v_bias: Leaf
    o_bias: Leaf
    q_norm: Leaf
    k_norm: Leaf
    attention_post_norm: Leaf
    mlp_norm: Leaf
    gate: Leaf
    up: Leaf
    down: Leaf
    gate_bias: Leaf
    up_bias: Leaf
    down_bias: Leaf
    mlp_post_norm: Leaf


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    embedding: Leaf  # [V, E]
    layers: LayerWeights
    final_norm: Leaf  # [E]
    head: Leaf  # [V, E]; None when tied to the embedding


class Decoder:
    """A model without its weights: what they look like, and the pure functions that use them."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def declaration(self) -> DecoderWeights:
        """The weights as Params."""
        c = self.config
        layer = partial(_layer_param, c.num_layers)
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        norm_init = "zeros" if c.norm_offset else "ones"
        norm = partial(layer, sizes=(c.hidden_size,), axes=("embed",), init=norm_init)
        head_norm = partial(layer, sizes=(c.head_dim,), axes=("head_dim",), init=norm_init)
        bias = partial(layer, init="zeros")
        when = lambda condition, make, *args: make(*args) if condition else None
        attention, mlp = "self_attn.", "mlp."
        layers = LayerWeights(
            input_norm=norm("input_layernorm.weight"),
            q=layer(attention + "q_proj.weight", (q_size, c.hidden_size), ("heads", "embed")),
            k=layer(attention + "k_proj.weight", (kv_size, c.hidden_size), ("kv_heads", "embed")),
            v=layer(attention + "v_proj.weight", (kv_size, c.hidden_size), ("kv_heads", "embed")),
            o=layer(attention + "o_proj.weight", (c.hidden_size, q_size), ("embed", "heads")),
            q_bias=when(c.qkv_bias, bias, attention + "q_proj.bias", (q_size,), ("heads",)),
            k_bias=when(c.qkv_bias, bias, attention + "k_proj.bias", (kv_size,), ("kv_heads",)),
            v_bias=when(c.qkv_bias, bias, attention + "v_proj.bias", (kv_size,), ("kv_heads",)),
            o_bias=when(c.output_bias, bias, attention + "o_proj.bias", (c.hidden_size,), ("embed",)),
            q_norm=when(c.qk_norm, head_norm, attention + "q_norm.weight"),
            k_norm=when(c.qk_norm, head_norm, attention + "k_norm.weight"),
            attention_post_norm=when(c.post_norms, norm, "post_attention_layernorm.weight"),
            mlp_norm=norm(("pre_feedforward" if c.post_norms else "post_attention") + "_layernorm.weight"),
            gate=layer(mlp + "gate_proj.weight", (c.intermediate_size, c.hidden_size), ("mlp", "embed")),
            up=layer(mlp + "up_proj.weight", (c.intermediate_size, c.hidden_size), ("mlp", "embed")),
            down=layer(mlp + "down_proj.weight", (c.hidden_size, c.intermediate_size), ("embed", "mlp")),
            gate_bias=when(c.mlp_bias, bias, mlp + "gate_proj.bias", (c.intermediate_size,), ("mlp",)),
            up_bias=when(c.mlp_bias, bias, mlp + "up_proj.bias", (c.intermediate_size,), ("mlp",)),
            down_bias=when(c.mlp_bias, bias, mlp + "down_proj.bias", (c.hidden_size,), ("embed",)),
            mlp_post_norm=when(c.post_norms, norm, "post_feedforward_layernorm.weight"),
        )
        vocab = ((c.vocab_size, c.hidden_size), ("vocab", "embed"))
        return DecoderWeights(
            embedding=Param(*vocab, source="model.embed_tokens.weight"),
            layers=layers,
            final_norm=Param((c.hidden_size,), ("embed",), "model.norm.weight", init=norm_init),
            head=None if c.tie_word_embeddings else Param(*vocab, source="lm_head.weight"),
        )

    def forward(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        token_ids: jax.Array,
        batch: RaggedBatch,
        addresses: LayerAddress,
        attention: RaggedPagedAttention,
    ) -> tuple[jax.Array, KVCache]:
        """token_ids [T]; addresses: LayerAddress of arrays [layers]. -> hidden states [T, E] before the final norm."""
        c = self.config
        x = embed(weights.embedding, token_ids)
        x = x * jnp.asarray(c.embedding_scale, x.dtype)
        cos, sin = rope_tables(c.ropes, batch.positions)  # [ropes, T, head_dim / 2]
        rope_index = jnp.asarray(c.layer_rope, jnp.int32)

        def layer(carry: tuple[jax.Array, KVCache], scanned: tuple) -> tuple[tuple[jax.Array, KVCache], None]:
            x, cache = carry
            w, address, rope = scanned
            attend = partial(attention, batch=batch, layer=address)
            mixed, cache = self._attention(w, self._norm(x, w.input_norm), (cos[rope], sin[rope]), cache, attend)
            x = x + (self._norm(mixed, w.attention_post_norm) if c.post_norms else mixed)
            mixed = self._mlp(w, self._norm(x, w.mlp_norm))
            x = x + (self._norm(mixed, w.mlp_post_norm) if c.post_norms else mixed)
            return (x, cache), None

        (x, cache), _ = lax.scan(layer, (x, cache), (weights.layers, addresses, rope_index))
        return x, cache

    def logits(self, weights: DecoderWeights, hidden: jax.Array) -> jax.Array:
        """hidden [R, E], as forward returns it -> float32 logits [R, V]."""
        head = weights.embedding if weights.head is None else weights.head
        logits = linear(self._norm(hidden, weights.final_norm), head, out_dtype=jnp.dtype(jnp.float32))
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _norm(self, x: jax.Array, weight: Leaf) -> jax.Array:
        return rms_norm(x, weight, self.config.norm_epsilon, self.config.norm_offset)

    def _attention(
        self,
        w: LayerWeights,
        x: jax.Array,  # [T, E]
        rope: tuple[jax.Array, jax.Array],
        cache: KVCache,
        attend: Callable[..., tuple[jax.Array, KVCache]],
    ) -> tuple[jax.Array, KVCache]:
        c, tokens = self.config, x.shape[0]
        q = linear(x, w.q, w.q_bias).reshape(tokens, c.num_heads, c.head_dim)
        k = linear(x, w.k, w.k_bias).reshape(tokens, c.num_kv_heads, c.head_dim)
        v = linear(x, w.v, w.v_bias).reshape(tokens, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self._norm(q, w.q_norm), self._norm(k, w.k_norm)
        out, cache = attend(
            rotate(q, *rope), rotate(k, *rope), v, cache, scale=c.attention_scale, soft_cap=c.attention_soft_cap
        )
        return linear(out.reshape(tokens, -1), w.o, w.o_bias), cache

    def _mlp(self, w: LayerWeights, x: jax.Array) -> jax.Array:
        act = jax.nn.silu if self.config.activation == "silu" else partial(jax.nn.gelu, approximate=True)
        gate = act(linear(x, w.gate, w.gate_bias).astype(jnp.float32)).astype(x.dtype)
        return linear(gate * linear(x, w.up, w.up_bias), w.down, w.down_bias)


def _layer_param(
    num_layers: int, source: str, sizes: tuple[int, ...], axes: tuple[str, ...], init: Any = "normal"
) -> Param:
    return Param((num_layers, *sizes), ("layers", *axes), "model.layers.{layer}." + source, init=init)
