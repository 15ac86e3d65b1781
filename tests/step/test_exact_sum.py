"""The sum behind top-p: right, and the same to the last bit however many rows there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.ops.sampling.xla import order_free_sum

total = jax.jit(lambda weights, kept: order_free_sum(weights)(kept))


@pytest.mark.parametrize("vocab", [192, 1600, 50_000])
def test_rows_do_not_matter(vocab: int) -> None:
    rng = np.random.default_rng(0)
    weights = np.exp(-rng.exponential(4, (20, vocab))).astype(np.float32)
    kept = rng.random((20, vocab)) < 0.5
    whole = np.asarray(total(weights, kept))
    np.testing.assert_allclose(whole, np.sum(weights.astype(np.float64) * kept, axis=-1), rtol=1e-6)
    for rows in (1, 2, 3, 5, 8, 16):
        np.testing.assert_array_equal(total(weights[:rows], kept[:rows]), whole[:rows])


@pytest.mark.parametrize("tail", [1.0, 1e-5, 1e-9, 1e-12, 0.0])
def test_a_long_tail_counts_and_does_not_overflow(tail: float) -> None:
    weights = jnp.full((1, 2**18), tail, jnp.float32).at[0, 0].set(1.0)
    np.testing.assert_allclose(total(weights, True), 1 + (2**18 - 1) * tail, rtol=1e-6)


def test_more_kept_is_never_less() -> None:
    """The search for the nucleus is a bisection: it needs a sum that is monotone."""
    rng = np.random.default_rng(1)
    weights = np.sort(np.exp(-rng.exponential(6, (1, 300))).astype(np.float32))[:, ::-1]
    sums = [float(total(weights, np.arange(300)[None] < count)[0]) for count in range(301)]
    assert sums[0] == 0
    assert sums == sorted(sums)
