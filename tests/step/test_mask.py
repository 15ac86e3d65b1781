"""Masks of grammars on the device, against numpy."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.step.shape import apply_mask, mask_width

run = jax.jit(apply_mask)


@settings(max_examples=30)
@given(vocab=st.sampled_from([1, 31, 32, 33, 70, 192]), rows=st.sampled_from([2, 5]), data=st.data())
def test_bit_b_of_word_w_is_token_32_w_plus_b(vocab: int, rows: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    allowed = rng.random((rows, vocab)) < 0.5
    allowed[rng.integers(rows)] = data.draw(st.booleans())
    mask = np.zeros((rows, mask_width(vocab)), np.int64)
    for row, token in np.argwhere(allowed):
        mask[row, token // 32] |= 1 << token % 32
    found = np.asarray(run(logits, mask.astype(np.uint32).view(np.int32)))
    assert (found == np.where(allowed, logits, -np.inf)).all()


def test_ones_change_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    assert (np.asarray(run(logits, np.full((3, 3), -1, np.int32))) == logits).all()
