"""EAGLE-3 (Li et al. 2025): one decoder layer that drafts from the hidden states of the model it belongs to.

At each position it takes the model's hidden states behind three layers, fused into one, and the embedding of the token
that follows, which the model does not know yet. What it yields stands for the next position's fused states when it goes
on by itself. Its vocabulary is a part of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from noria.errors import WeightsError
from noria.models.config import DecoderConfig, Keys, dense_config
from noria.nn.param import Param
from noria.nn.rope import rope_tables
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import KVCache, LayerAddress, RaggedBatch
from noria.ops.rms_norm import RmsNorm

Leaf = Any  # a Param in a declaration, an array in loaded weights


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """Matrices are weights of the linear op with one layer, norms are [E]."""

    fuse: Leaf  # [E, states * E]
    embedding_norm: Leaf
    hidden_norm: Leaf
    q: Leaf  # [., 2 E], as k and v: of the embedding and the hidden state, side by side
    k: Leaf
    v: Leaf
    o: Leaf
    mlp_norm: Leaf
    gate: Leaf
    up: Leaf
    down: Leaf
    final_norm: Leaf
    head: Leaf  # [draft vocabulary, E]
    offsets: Leaf  # [draft vocabulary] int32: draft token d is token d + offsets[d]; None where all tokens are drafted


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    layer: DecoderConfig  # of its one layer; vocab_size is the model's
    draft_vocab_size: int
    states: tuple[int, ...]  # numbers of layers behind which it takes the model's hidden states


class Eagle3Head:
    """A head without its weights: what they look like, and the pure functions that use them."""

    def __init__(self, config: HeadConfig) -> None:
        self.config = config

    def declaration(self) -> HeadWeights:
        c, vocab = self.config.layer, self.config.draft_vocab_size
        heads, kv_heads, mlp = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        size = c.hidden_size
        norm = lambda name: Param((size,), ("embed",), name + ".weight", init="ones")

        def matrix(name: str, out: int, into: int, axes: tuple[str, str]) -> Param:
            return Param((out, into), axes, name + ".weight", matrix=True)

        attention, mlps = "midlayer.self_attn.", "midlayer.mlp."
        return HeadWeights(
            fuse=matrix("fc", size, len(self.config.states) * size, ("embed", "embed")),
            embedding_norm=norm("midlayer.input_layernorm"),
            hidden_norm=norm("midlayer.hidden_norm"),
            q=matrix(attention + "q_proj", heads, 2 * size, ("heads", "embed")),
            k=matrix(attention + "k_proj", kv_heads, 2 * size, ("kv_heads", "embed")),
            v=matrix(attention + "v_proj", kv_heads, 2 * size, ("kv_heads", "embed")),
            o=matrix(attention + "o_proj", size, heads, ("embed", "heads")),
            mlp_norm=norm("midlayer.post_attention_layernorm"),
            gate=matrix(mlps + "gate_proj", mlp, size, ("mlp", "embed")),
            up=matrix(mlps + "up_proj", mlp, size, ("mlp", "embed")),
            down=matrix(mlps + "down_proj", size, mlp, ("embed", "mlp")),
            final_norm=norm("norm"),
            head=matrix("lm_head", vocab, size, ("vocab", "embed")),
            offsets=None if vocab == c.vocab_size else self._offsets(),
        )

    def _offsets(self) -> Param:
        """Every device has all of them, because any token may be looked up."""
        return Param((self.config.draft_vocab_size,), ("draft_vocab",), "d2t", init="zeros", dtype="int32")

    def fuse(self, weights: HeadWeights, states: jax.Array, rows: jax.Array, ops: Ops) -> jax.Array:
        """states [T, ., E], as the configuration asks; rows: int32, those that count. -> [T, E]."""
        (fused,) = ops.linear.linear(states.reshape(states.shape[0], -1), (weights.fuse,), jnp.int32(0), rows)
        return fused

    def forward(
        self,
        weights: HeadWeights,
        cache: KVCache,
        embedded: jax.Array,
        hidden: jax.Array,
        batch: RaggedBatch,
        address: LayerAddress,
        ops: Ops,
    ) -> tuple[jax.Array, KVCache]:
        """embedded [T, E]: the tokens that follow, by the model's embedding. hidden [T, E]: fused states, or what this
        returned for the position before. -> [T, E] before the final norm, and the cache."""
        c, zero, rows = self.config.layer, jnp.int32(0), batch.num_tokens
        linear = partial(ops.linear.linear, layer=zero, rows=rows)
        parts = (self._norm(weights.embedding_norm)(embedded, zero), self._norm(weights.hidden_norm)(hidden, zero))
        x = jnp.concatenate(parts, axis=-1).astype(hidden.dtype)
        q, k, v = (y.reshape(len(x), -1, c.head_dim) for y in linear(x, (weights.q, weights.k, weights.v)))
        cos, sin = rope_tables(c.ropes, batch.positions)
        q, k = ops.rotary(q, k, cos=cos, sin=sin, rope=zero, layer=zero, rows=rows)
        out, cache = ops.attention(q, k, v, cache, batch=batch, layer=address, scale=c.attention_scale)
        (x,) = linear(out.reshape(len(x), -1), (weights.o,), residual=hidden)
        norm = self._norm(weights.mlp_norm)
        (gated,) = linear(x, (weights.gate, weights.up), activation=c.activation, norm=norm)
        (x,) = linear(gated, (weights.down,), residual=x)
        return x, cache

    def logits(self, weights: HeadWeights, hidden: jax.Array, num_rows: jax.Array, vocab: int, ops: Ops) -> jax.Array:
        """hidden [R, E], as forward returns it -> float32 [R, vocab], minus infinity for tokens that it does not draft.

        vocab: size of the model's vocabulary.
        """
        norm = self._norm(weights.final_norm)
        (logits,) = ops.linear.linear(
            hidden, (weights.head,), jnp.int32(0), num_rows, norm=norm, out_dtype=jnp.dtype(jnp.float32)
        )
        if weights.offsets is None:
            return logits
        tokens = jnp.arange(logits.shape[1]) + weights.offsets
        return jnp.full((logits.shape[0], vocab), -jnp.inf).at[:, tokens].set(logits)

    def greedy(self, weights: HeadWeights, hidden: jax.Array, num_rows: jax.Array, ops: Ops) -> jax.Array:
        """The likeliest tokens [R]; -1 where the logits are not finite."""
        size, norm = self.config.draft_vocab_size, self._norm(weights.final_norm)
        best = ops.linear.argmax(hidden, weights.head, num_rows, num_choices=size, norm=norm)
        if weights.offsets is None:
            return best
        return jnp.where(best >= 0, best + weights.offsets[jnp.maximum(best, 0)], best)

    def _norm(self, weight: Leaf) -> RmsNorm:
        return RmsNorm(weight[None], self.config.layer.norm_epsilon)


def build_head(config: Mapping[str, Any], target: DecoderConfig) -> Eagle3Head:
    """The head that a checkpoint's config describes. Raises WeightsError when it does not belong to the target."""
    keys = Keys(config)
    if "draft_vocab_size" not in config:
        raise WeightsError("config.json has no draft_vocab_size, so it is no EAGLE-3 head; name the head's own folder")
    for name in ("attention_bias", "mlp_bias", "norm_before_residual"):
        if config.get(name):
            raise WeightsError(f"config.json: {name} is not supported for an EAGLE-3 head; choose another head")
    if (layers := keys.integer("num_hidden_layers", 1)) != 1:
        raise WeightsError(f"config.json: an EAGLE-3 head has one layer, not num_hidden_layers {layers}")
    for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        for key in (name, "target_" + name):
            if (value := keys.integer(key, own)) != own:
                raise WeightsError(
                    f"config.json: {key} is {value}, but the model's {name} is {own}; choose a head that was made for "
                    "this model"
                )
    layer = dense_config({"num_hidden_layers": 1} | dict(config), activations={"silu": "silu"})
    size = keys.integer("draft_vocab_size")
    if size > target.vocab_size:
        raise WeightsError(
            f"config.json: draft_vocab_size ({size}) must not exceed the model's vocab_size ({target.vocab_size})"
        )
    return Eagle3Head(HeadConfig(layer=layer, draft_vocab_size=size, states=_states(config, target.num_layers)))


def _states(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of layers. Without a list, those of the published heads: 2, half and all but 3.

    Two conventions of the same name are about: in `eagle_config` (TensorRT-LLM, SGLang) layers are named whose output
    is wanted, on the top level (vLLM) those whose input is.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config")
    given, shift = config.get(name), 0
    if isinstance(nested, Mapping) and nested.get(name) is not None:
        given, shift = nested[name], 1
    if given is None:
        given = [2, layers // 2, layers - 3]
    ids = given if isinstance(given, list) else [given]
    is_number = lambda value: isinstance(value, int) and not isinstance(value, bool)
    if len(ids) != 3 or not all(is_number(i) and 0 <= i + shift <= layers for i in ids) or len(set(ids)) != 3:
        raise WeightsError(
            f"config.json: {name} must be three different layers of the model's {layers}, not {given}; choose a head "
            "that was made for this model"
        )
    return tuple(i + shift for i in ids)
