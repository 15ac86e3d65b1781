"""In float32 on the CPU a row's result is the same to the last bit however many rows are computed with it.

Everything else (buckets, chunks, batch mates, prefix cache) rests on this. XLA does not promise it, so a new version of
it may break it: these tests say which operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.nn.rope import make_rope, rope_tables
from noria.nn.routing import Routing
from noria.ops.linear.types import DenseWeight
from noria.ops.linear.xla import linear
from noria.ops.rms_norm import RmsNorm
from noria.ops.rotary.xla import rotary

COUNTS = (2, 5, 17, 64, 256)


def assert_rows_alike(function: Callable[..., jax.Array], *arrays: np.ndarray) -> None:
    compiled = jax.jit(function)
    whole = np.asarray(compiled(*arrays))
    for count in COUNTS:
        part = np.asarray(compiled(*(array[:count] for array in arrays)))
        differ = np.flatnonzero((part != whole[:count]).reshape(count, -1).any(axis=1))
        assert differ.size == 0, f"rows {differ} of {count} differ from those of {len(whole)}"


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((COUNTS[-1], *shape), np.float32)


@pytest.mark.parametrize("experts", [8, 60, 64, 128])
@pytest.mark.parametrize(
    "options", [{"renormalize": True}, {"renormalize": False}, {"renormalize": True, "scoring": "sigmoid"}], ids=str
)
def test_routing(experts: int, options: dict[str, Any]) -> None:
    """Also of more than 4,096 scores, which XLA computes in another way than few."""
    routing = Routing(experts=experts, chosen=4, **options)
    logits = np.concatenate([rows(experts)] * 4)
    assert_rows_alike(lambda logits: routing(logits).shares, logits)
    assert_rows_alike(lambda logits: routing(logits).ids, logits)


@pytest.mark.parametrize(("size", "outputs"), [(48, 112), (320, 864), (1536, 576), (64, 2000)])
def test_linear(size: int, outputs: int) -> None:
    weight = DenseWeight(jnp.asarray(np.random.default_rng(1).standard_normal((1, outputs, size), np.float32)))
    assert_rows_alike(lambda x: linear(x, [weight], jnp.int32(0), jnp.int32(len(x)))[0], rows(size))


@pytest.mark.parametrize("shape", [(16,), (48,), (320,), (576,), (2048,), (1, 24), (3, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(1).standard_normal(shape[-1]).astype(np.float32)
    norm = RmsNorm(jnp.asarray(weight)[None], 1e-6)
    assert_rows_alike(lambda x: norm(x, jnp.int32(0)), rows(*shape))


def test_rms_norm_is_the_root_mean_square() -> None:
    x, weight = rows(3, 40), np.linspace(-1, 1, 40, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * (weight + 1.0)
    norm = RmsNorm(jnp.stack([jnp.zeros(40), jnp.asarray(weight)]), 1e-5, 1.0)
    np.testing.assert_allclose(jax.jit(lambda x: norm(x, jnp.int32(1)))(x), expected, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_rope(head_dim: int) -> None:
    rope = make_rope(head_dim, 10000.0, None, 512)

    def turn(x: jax.Array, positions: jax.Array) -> jax.Array:
        tables = rope_tables((rope,), positions)
        return rotary(x, x, *tables, jnp.int32(0), jnp.int32(0), jnp.int32(len(x)))[0]

    assert_rows_alike(turn, rows(3, head_dim), np.arange(COUNTS[-1], dtype=np.int32))


@pytest.mark.parametrize(
    "activation", [jax.nn.silu, functools.partial(jax.nn.gelu, approximate=True)], ids=["silu", "gelu_tanh"]
)
def test_activation(activation: Callable[[jax.Array], jax.Array]) -> None:
    assert_rows_alike(activation, rows(112))
