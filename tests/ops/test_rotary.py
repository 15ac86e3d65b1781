"""The shared suite of the rotary op: every back end and processor path."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_weights import ALL, PATHS, needs_library

from noria.nn.rope import make_rope, rope_tables
from noria.ops.rms_norm import RmsNorm
from noria.ops.rotary import cpu, xla

LAYER, ROPE = np.int32(1), np.int32(1)


def tables(tokens: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    ropes = tuple(make_rope(head_dim, theta, None, 512) for theta in (10.0, 10000.0))
    return rope_tables(ropes, jnp.arange(tokens, dtype=jnp.int32) * 3)


def heads(tokens: int, count: int, head_dim: int, dtype: str, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((tokens, count, head_dim), np.float32)
    return jnp.asarray(values, dtype)


def norm(head_dim: int, dtype: str, seed: int) -> RmsNorm:
    weight = np.random.default_rng(seed).standard_normal((2, head_dim)).astype(np.float32)
    return RmsNorm(jnp.asarray(weight, dtype), 1e-3, 0.5)


def test_complex_numbers_turn_alike():
    """The pairs (i, i + half) as complex numbers, times e^(i angle)."""
    x = heads(9, 3, 24, "float32")
    cos, sin = tables(9, 24)
    got, _ = xla.rotary(x, x, cos, sin, ROPE, LAYER, ALL)
    numbers = np.asarray(x[..., :12], np.float64) + 1j * np.asarray(x[..., 12:], np.float64)
    angles = np.arange(9)[:, None] * 3 * 10000.0 ** -(np.arange(12) / 12)
    turned = numbers * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "normed"), [(16, 0), (24, 1), (64, 2), (80, 3), (256, 3)])
def test_native_is_xla(head_dim, normed, dtype):
    q_norm = norm(head_dim, dtype, 1) if normed & 1 else None
    k_norm = norm(head_dim, dtype, 2) if normed & 2 else None
    for tokens in (1, 70):
        q, k = heads(tokens, 4, head_dim, dtype), heads(tokens, 2, head_dim, dtype, 1)
        call = (q, k, *tables(tokens, head_dim), ROPE, LAYER)
        options = {"q_norm": q_norm, "k_norm": k_norm}
        want = jax.jit(partial(xla.rotary, **options))(*call, ALL)  # one program instead of many small ones
        for path in PATHS:
            for got, other in zip(cpu.rotary(*call, ALL, **options, path=path), want):
                assert (got.shape, got.dtype) == (other.shape, other.dtype)
                tolerance = 1e-5 if dtype == "float32" else 0.03
                np.testing.assert_allclose(
                    got.astype("float32"), other.astype("float32"), atol=tolerance, rtol=tolerance
                )
            for got, whole in zip(cpu.rotary(*call, np.int32(3), **options, path=path), want):
                assert not np.asarray(got[3:].astype("float32")).any()
                np.testing.assert_allclose(got[:3].astype("float32"), whole[:3].astype("float32"), atol=0.03, rtol=0.03)


@needs_library
@pytest.mark.parametrize("path", PATHS)
def test_tokens_do_not_know_each_other(path):
    q, k = heads(300, 9, 64, "float32"), heads(300, 3, 64, "float32", 1)
    cos, sin = tables(300, 64)
    parts = {"q_norm": norm(64, "float32", 1), "path": path}
    whole = cpu.rotary(q, k, cos, sin, ROPE, LAYER, ALL, **parts, threads=3)
    for count in (1, 2, 9, 80):
        part = cpu.rotary(q[-count:], k[-count:], cos[:, -count:], sin[:, -count:], ROPE, LAYER, ALL, **parts)
        for one, other in zip(part, whole):
            np.testing.assert_array_equal(one, other[-count:])


@needs_library
def test_bad_calls_are_errors():
    q, k = heads(4, 4, 16, "float32"), heads(4, 2, 16, "float32")
    cos, sin = tables(4, 16)
    with pytest.raises(Exception, match="rope does not exist"):
        jax.block_until_ready(cpu.rotary(q, k, cos, sin, np.int32(2), LAYER, ALL))
    with pytest.raises(Exception, match="of one size"):
        jax.block_until_ready(cpu.rotary(q, heads(4, 2, 18, "float32"), cos, sin, ROPE, LAYER, ALL))
