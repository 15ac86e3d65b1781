"""Choices in the order of their experts, and back."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from noria.ops.experts.types import Choice


@dataclass(frozen=True)
class Sorted:
    """A slot is one choice of one token, in the order of their experts; those that nobody here computes are last."""

    tokens: jax.Array  # [slots] int32: whose choice it is
    counts: jax.Array  # [num_experts] int32: slots of each expert
    starts: jax.Array  # [num_experts] int32: its first one
    places: jax.Array  # [T, chosen] int32: the slot of each choice
    is_computed: jax.Array  # [T, chosen] bool


def by_expert(choice: Choice, rows: jax.Array, num_experts: int, first: jax.Array | int) -> Sorted:
    """rows, num_experts, first: see api.py."""
    tokens, chosen = choice.ids.shape
    own = choice.ids - first
    is_row = jnp.arange(tokens, dtype=jnp.int32)[:, None] < rows
    is_computed = (own >= 0) & (own < num_experts) & is_row
    keys = jnp.where(is_computed, own, num_experts).reshape(-1)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    counts = jnp.sum(keys[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    slots = jnp.arange(tokens * chosen, dtype=jnp.int32)
    places = jnp.zeros_like(slots).at[order].set(slots, unique_indices=True)
    return Sorted(
        tokens=order // chosen,
        counts=counts,
        starts=jnp.cumsum(counts) - counts,
        places=places.reshape(tokens, chosen),
        is_computed=is_computed,
    )


def combine(y: jax.Array, order: Sorted, shares: jax.Array) -> jax.Array:
    """y [slots or more, K] float32 -> [T, K]: the results of each token's choices times their shares, summed in the
    order of its choices, whatever else is computed."""
    total = jnp.zeros((shares.shape[0], y.shape[1]), jnp.float32)
    for number in range(shares.shape[1]):
        one = jnp.take(y, order.places[:, number], axis=0, mode="clip") * shares[:, number, None]
        total = total + jnp.where(order.is_computed[:, number, None], one, 0)
    return total
