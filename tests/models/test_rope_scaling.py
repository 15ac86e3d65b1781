"""Frequencies of each kind of rope scaling, against values that transformers 5.24 computed for a head of 16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.errors import WeightsError
from noria.nn.rope import make_rope, rope_tables
from noria.ops.rotary.xla import rotary

EXPECTED: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "linear": (
        {"rope_type": "linear", "factor": 8.0},
        [0.125, 0.0395285, 0.0125, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05],
        1.0,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        [1.0, 0.09584, 0.0125, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05],
        1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.237171, 0.05, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.13863,
    ),
    "yarn with its own betas": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 0.8,
        },
        [1.0, 0.197642, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        0.8,
    ),
    "yarn with mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        [1.0, 0.316228, 0.1, 0.0239147, 0.005125, 0.000849862, 2.5e-05, 7.90569e-06],
        0.921042,
    ),
    "yarn not rounded": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        [1.0, 0.198584, 0.0255952, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.13863,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_frequencies(name: str):
    scaling, frequencies, magnitude = EXPECTED[name]
    rope = make_rope(16, 10_000.0, scaling, 256)
    np.testing.assert_allclose(rope.inverse_frequencies, frequencies, rtol=1e-5)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-5)


def test_no_scaling():
    plain = make_rope(16, 10_000.0, None, 256)
    np.testing.assert_allclose(plain.inverse_frequencies, 10_000.0 ** (-np.arange(8) / 8))
    assert plain == make_rope(16, 10_000.0, {"rope_type": "default"}, 256)
    assert plain.magnitude == 1.0


def test_factors_of_a_gguf_file():
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    plain = make_rope(16, 10_000.0, None, 256)
    scaled = make_rope(16, 10_000.0, {"rope_type": "factors", "factors": factors}, 256)
    np.testing.assert_allclose(np.array(plain.inverse_frequencies) / scaled.inverse_frequencies, factors)


def test_unknown_kind():
    with pytest.raises(WeightsError, match="rope scaling ntk is not supported; supported: default, linear"):
        make_rope(16, 10_000.0, {"rope_type": "ntk"}, 256)


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, rope: int = 0) -> jax.Array:
    return rotary(x, x, cos, sin, jnp.int32(rope), jnp.int32(0), jnp.int32(len(x)))[0]


def test_rotation_turns_pairs_by_position_times_frequency():
    rope = make_rope(8, 100.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256)
    other = make_rope(8, 10.0, None, 256)
    positions = jnp.array([0, 1, 7, 200])
    x = jax.random.normal(jax.random.key(0), (4, 2, 8), jnp.float32)
    cos, sin = rope_tables((other, rope), positions)
    assert cos.shape == sin.shape == (2, 4, 4)
    turned = np.asarray(turn(x, cos, sin, rope=1))
    pairs = np.asarray(x)[..., :4] + 1j * np.asarray(x)[..., 4:]
    angles = np.array(positions)[:, None, None] * np.array(rope.inverse_frequencies)
    expected = pairs * np.exp(1j * angles) * rope.magnitude
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)


def test_scores_depend_on_distance_only():
    rope = make_rope(16, 10_000.0, None, 4096)
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 16), jnp.float32)

    def score(query_at: int, key_at: int) -> float:
        cos, sin = rope_tables((rope,), jnp.array([query_at, key_at]))
        return float(jnp.sum(turn(q, cos[:, :1], sin[:, :1]) * turn(k, cos[:, 1:], sin[:, 1:])))

    assert score(1005, 1000) == pytest.approx(score(5, 0), abs=1e-3)
    assert score(1005, 1000) != pytest.approx(score(1000, 1005), abs=1e-3)
