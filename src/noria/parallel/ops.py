"""The ops on a mesh: each device runs them on its heads and requests, or on its part of the vocabulary.

The products with matrices are left to XLA's partitioner, which finds everything it needs in the places of the weights:
the first of two is split along its outputs and the second along its inputs, and their sum is the one exchange. Where
attention is split by request beside that, the partitioner is told where the residual stream lies: with all devices of a
copy of the model, which share the next MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from noria.ops.backends import Ops
from noria.ops.experts.types import Choice, ExpertMatrices
from noria.ops.linear.api import Backend
from noria.ops.linear.types import Weight
from noria.ops.ragged_paged_attention.api import KVCache, LayerAddress, RaggedBatch
from noria.ops.rms_norm import RmsNorm
from noria.parallel.placement import Placement
from noria.parallel.rules import mesh_axes, num_shards, partition

_WHOLE = PartitionSpec()


def on_mesh(ops: Ops, placement: Placement) -> Ops:
    """The same signatures and, apart from the order in which devices sum, the same results."""
    if not placement.is_parallel:
        return ops
    linear = dataclasses.replace(
        ops.linear,
        embed=partial(_embed, ops.linear, placement),
        argmax=partial(_argmax, ops.linear, placement),
        linear=partial(_linear, ops.linear, placement),
    )
    return dataclasses.replace(
        ops,
        attention=partial(_attention, ops, placement),
        linear=linear,
        rotary=partial(_rotary, ops, placement),
        experts=partial(_experts, ops, placement),
    )


def _each_device(placement: Placement, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _spec(placement: Placement, *axes: str | None) -> PartitionSpec:
    """By logical axes that always divide."""
    return partition(axes, (0,) * len(axes), placement.mesh)


def _by_heads(placement: Placement, axis: str) -> PartitionSpec:
    """Of [T, heads, head_dim]."""
    return _spec(placement, "ranks", axis, None)


def _attention(
    ops: Ops,
    placement: Placement,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cache: KVCache,
    batch: RaggedBatch,
    layer: LayerAddress,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, KVCache]:
    queries, keys = _by_heads(placement, "heads"), _by_heads(placement, "kv_heads")
    places = jax.tree.map(lambda _: _spec(placement, "ranks", None, "kv_heads"), cache)
    by_rank = _spec(placement, "ranks")
    parts = jax.tree.map(lambda _: by_rank, batch)
    parts = dataclasses.replace(parts, block_tables=_spec(placement, None, "ranks"))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, batch: RaggedBatch, layer: LayerAddress) -> Any:
        own = dataclasses.replace(batch, num_ranks=1)
        return ops.attention(q, k, v, cache, own, layer, scale=scale, soft_cap=soft_cap)

    call = _each_device(placement, local, (queries, keys, keys, places, parts, _WHOLE), (queries, places))
    return call(q, k, v, cache, batch, layer)


def _rotary(
    ops: Ops,
    placement: Placement,
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rope: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    *,
    q_norm: RmsNorm | None = None,
    k_norm: RmsNorm | None = None,
) -> tuple[jax.Array, jax.Array]:
    def local(q: jax.Array, k: jax.Array, norms: Any, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.rotary(q, k, *rest, q_norm=norms[0], k_norm=norms[1])

    heads = _by_heads(placement, "heads"), _by_heads(placement, "kv_heads")
    angles = _spec(placement, None, "ranks")
    call = _each_device(placement, local, (*heads, _WHOLE, angles, angles, *[_WHOLE] * 3), heads)
    return call(q, k, (q_norm, k_norm), cos, sin, rope, layer, rows)


def _experts(
    ops: Ops,
    placement: Placement,
    x: jax.Array,
    matrices: ExpertMatrices,
    layer: jax.Array,
    rows: jax.Array,
    choice: Choice,
    *,
    num_experts: int,
    activation: str,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Each device computes what was chosen of its experts, with its part of their inside, for all tokens of its
    copy of the model; the sum over all devices of the copy is the one exchange."""
    mesh, by_token = placement.mesh, _spec(placement, "tokens")
    axes, inner = mesh_axes("expert", mesh), mesh_axes("expert_mlp", mesh)
    held = num_experts // num_shards("expert", mesh)

    def local(x: jax.Array, matrices: ExpertMatrices, choice: Choice, layer: jax.Array, rows: jax.Array) -> jax.Array:
        own = first + lax.axis_index(axes) * held if axes else first
        y = ops.experts(x, matrices, layer, rows, choice, num_experts=held, activation=activation, first=own)
        return lax.psum(y, (*axes, *inner))

    def places(weight: Weight, last: tuple[str | None, str | None]) -> Any:
        """Specs of its leaves: data, and the scale, which has one axis fewer."""
        names = (None, "expert", *last)
        return jax.tree.map(lambda leaf: partition(names[: leaf.ndim], leaf.shape, mesh), weight)

    by_inner = partial(places, last=("expert_mlp", None))
    specs = ExpertMatrices(
        by_inner(matrices.gate), by_inner(matrices.up), places(matrices.down, last=(None, "expert_mlp"))
    )
    call = _each_device(placement, local, (by_token, specs, by_token, _WHOLE, _WHOLE), by_token)
    return call(x, matrices, choice, layer, rows)


def _vocab_places(placement: Placement, table: Weight) -> tuple[Any, tuple[str, ...]]:
    """Of a weight [V, E]: specs of its leaves, and the axes of the mesh that its vocabulary is split over."""
    spec = partition(("layers", "vocab"), (1, table.out_features), placement.mesh)
    axes = mesh_axes("vocab", placement.mesh) if spec[1] is not None else ()
    return jax.tree.map(lambda _: spec, table), axes


def _embed(backend: Backend, placement: Placement, table: Weight, token_ids: jax.Array, dtype: Any) -> jax.Array:
    """Each device looks up what its part of the table has, and zeros stand for the rest."""
    places, axes = _vocab_places(placement, table)
    size = table.out_features

    def local(table: Weight, token_ids: jax.Array) -> jax.Array:
        if not axes:
            return backend.embed(table, token_ids, dtype)
        rows = table.out_features
        mine = jnp.clip(token_ids, 0, size - 1) - lax.axis_index(axes) * rows
        found = backend.embed(table, jnp.clip(mine, 0, rows - 1), dtype)
        return lax.psum(jnp.where(((mine >= 0) & (mine < rows))[:, None], found, 0), axes)

    by_token = _spec(placement, "tokens")
    return _each_device(placement, local, (places, by_token), by_token)(table, token_ids)


def _linear(
    backend: Backend,
    placement: Placement,
    x: jax.Array,
    weights: Sequence[Weight],
    layer: jax.Array,
    rows: jax.Array,
    *,
    residual: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    results = backend.linear(x, weights, layer, rows, residual=residual, **options)
    if residual is None:
        return results
    place = NamedSharding(placement.mesh, _spec(placement, "tokens"))
    return tuple(lax.with_sharding_constraint(y, place) for y in results)


def _argmax(
    backend: Backend,
    placement: Placement,
    x: jax.Array,
    weight: Weight,
    rows: jax.Array,
    *,
    num_choices: int,
    norm: RmsNorm | None = None,
    quantize_x: bool = False,
) -> jax.Array:
    """Each device finds the largest of its logits; only those are exchanged."""
    places, axes = _vocab_places(placement, weight)

    def local(x: jax.Array, weight: Weight, rows: jax.Array, norm: RmsNorm | None) -> jax.Array:
        if not axes:
            return backend.argmax(x, weight, rows, num_choices=num_choices, norm=norm, quantize_x=quantize_x)
        (logits,) = backend.linear(x, (weight,), jnp.int32(0), rows, norm=norm, out_dtype=jnp.dtype(jnp.float32))
        first = lax.axis_index(axes) * weight.out_features
        is_choice = first + jnp.arange(logits.shape[1]) < num_choices
        # A maximum that is compared with itself must not be computed twice, in fusions that may round differently.
        logits = lax.optimization_barrier(jnp.where(is_choice, logits, -jnp.inf))
        best = lax.all_gather(jnp.max(logits, axis=-1), axes)  # [shards, R]
        ids = lax.all_gather(first + jnp.argmax(logits, axis=-1), axes)
        shard = jnp.argmax(best, axis=0)  # the first of equals, whose ids are the lowest
        pick = lambda values: jnp.take_along_axis(values, shard[None], axis=0)[0]
        return jnp.where(jnp.isfinite(pick(best)), pick(ids), -1).astype(jnp.int32)

    by_token = _spec(placement, "tokens")
    call = _each_device(placement, local, (by_token, places, _WHOLE, _WHOLE), by_token)
    return call(x, weight, rows, norm)
