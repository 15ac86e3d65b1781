"""Multi-head latent attention (DeepSeek-V2, section 2.1): what is cached of a token is one latent vector and one key.

The projections of the latent vector to keys and values are absorbed: queries are taken into the latent space, where all
heads share one key, and results out of it. So attention has a single KV head, whose keys are the cached latent vector
and rotated key, side by side, and whose values are the latent part of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.models.config import DecoderConfig, Mla
from noria.nn.param import Param
from noria.ops.ragged_paged_attention.api import KVCache
from noria.ops.rms_norm import RmsNorm

Leaf = Any  # a Param in a declaration, an array in loaded weights
_EPSILON = 1e-6  # of the norms within; the config's is that of the others


@tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """Each of all layers. Either queries are made in two steps (q_a, q_norm, q_b) or in one (q_b alone, of x)."""

    q_a: Leaf  # [query rank, E] or None
    q_norm: Leaf  # [query rank] or None
    q_b: Leaf  # [heads * (plain + rotated), query rank or E]
    kv_a: Leaf  # [latent + rotated, E]
    kv_norm: Leaf  # [latent]
    kv_b: Leaf  # [heads * (plain + value), latent]
    o: Leaf  # [E, heads * value]


def declare(config: DecoderConfig, mla: Mla) -> MlaWeights:
    """The weights as Params."""
    hidden, heads, layers = config.hidden_size, config.num_heads, config.num_layers

    def param(name: str, shape: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> Param:
        return Param(
            (layers, *shape), ("layers", *axes), "model.layers.{layer}.self_attn." + name + ".weight", **options
        )

    rank, queries = mla.query_rank, heads * (mla.plain + mla.rotated)
    into, axis = (hidden, "embed") if rank is None else (rank, "latent")
    name = "q_proj" if rank is None else "q_b_proj"
    q_a = None if rank is None else param("q_a_proj", (rank, hidden), ("latent", "embed"), matrix=True)
    q_norm = None if rank is None else param("q_a_layernorm", (rank,), ("latent",), init="ones")
    return MlaWeights(
        q_a=q_a,
        q_norm=q_norm,
        q_b=param(name, (queries, into), ("heads", axis), matrix=True),
        kv_a=param("kv_a_proj_with_mqa", (mla.latent + mla.rotated, hidden), ("latent", "embed"), matrix=True),
        kv_norm=param("kv_a_layernorm", (mla.latent,), ("latent",), init="ones"),
        kv_b=param("kv_b_proj", (heads * (mla.plain + mla.value), mla.latent), ("heads", "latent")),
        o=param("o_proj", (hidden, heads * mla.value), ("embed", "heads"), matrix=True),
    )


def attention(
    config: DecoderConfig,
    mla: Mla,
    weights: MlaWeights,
    norm: RmsNorm | None,
    x: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    linear: Callable[..., tuple[jax.Array, ...]],
    turn: Callable[..., tuple[jax.Array, jax.Array]],
    attend: Callable[..., tuple[jax.Array, KVCache]],
) -> tuple[jax.Array, KVCache]:
    """x [T, E] -> x plus attention of its norm, and the cache. linear, turn, attend: the ops, of this layer."""
    tokens, w = x.shape[0], weights
    if w.q_a is None:
        q, latent = linear(x, (w.q_b, w.kv_a), norm=norm)
    else:
        q, latent = linear(x, (w.q_a, w.kv_a), norm=norm)
        (q,) = linear(q, (w.q_b,), norm=RmsNorm(w.q_norm, _EPSILON))
    q = q.reshape(tokens, -1, mla.plain + mla.rotated)
    plain, latent, key = q[..., : mla.plain], latent[:, : mla.latent], latent[:, mla.latent :]
    latent = RmsNorm(w.kv_norm, _EPSILON)(latent, layer).astype(x.dtype)
    copies = (tokens, config.num_kv_heads)  # one KV head, or a copy of it for each device
    key = jnp.broadcast_to(key[:, None], (*copies, mla.rotated))
    rotated = q[..., mla.plain :]
    if mla.interleaved:
        rotated, key = _halves(rotated), _halves(key)
    rotated, key = turn(rotated, key)
    both = lax.dynamic_index_in_dim(w.kv_b, layer, keepdims=False).reshape(q.shape[1], -1, mla.latent)
    to_keys, to_values = both[:, : mla.plain], both[:, mla.plain :]  # [heads, plain or value, latent]
    absorbed = _by_head("thn,hnl->thl", plain, to_keys).astype(x.dtype)
    queries = jnp.concatenate([absorbed, rotated], axis=-1)
    keys = jnp.concatenate([jnp.broadcast_to(latent[:, None], (*copies, mla.latent)), key], axis=-1)
    out, cache = attend(queries, keys, None, cache, scale=config.attention_scale)
    out = _by_head("thl,hvl->thv", out[..., : mla.latent], to_values)
    (x,) = linear(out.astype(x.dtype).reshape(tokens, -1), (w.o,), residual=x)
    return x, cache


def _by_head(subscripts: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """A product for each head, summed in float32. XLA's CPU code has none of two narrower arrays."""
    return lax.platform_dependent(
        x,
        matrices,
        cpu=lambda x, m: jnp.einsum(subscripts, x.astype(jnp.float32), m.astype(jnp.float32)),
        default=lambda x, m: jnp.einsum(subscripts, x, m, preferred_element_type=jnp.float32),
    )


def _halves(x: jax.Array) -> jax.Array:
    """[..., pairs * 2] with the two of a pair side by side -> all first ones, then all second ones."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
