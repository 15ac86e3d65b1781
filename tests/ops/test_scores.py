"""Log-probabilities, ranks and the likeliest tokens against numpy; always numbers, and the same in any company."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from noria.ops import native
from noria.ops.sampling import cpu, xla
from noria.ops.sampling.types import score_width
from noria.step.scores import LOWEST, read_scores

LIBRARY = native.load()
PATHS = LIBRARY.paths if isinstance(LIBRARY, native.NativeLibrary) else ()
OPS = {"xla": xla.score} | {path: partial(cpu.score, path=path) for path in PATHS}


class Figures:
    """What an op says, as the host reads it."""

    def __init__(self, op: Any) -> None:
        self._score = jax.jit(op, static_argnames="num_top")

    def __call__(
        self, logits: np.ndarray, token_ids: list[int], num_top: int, asked: list[int] | None = None
    ) -> list[tuple[tuple[Any, ...], ...]]:
        packed = self._score(logits, np.int32(token_ids), np.int32(len(logits)), num_top=num_top)
        assert packed.shape == (len(logits), score_width(num_top))
        return list(read_scores(np.asarray(packed), token_ids, asked or [num_top] * len(logits)))


@pytest.fixture(scope="module", params=OPS)
def figures(request: pytest.FixtureRequest) -> Figures:
    return Figures(OPS[request.param])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("vocab", [7, 192, 5000, 50_000])
def test_against_numpy(figures: Figures, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * 4).astype(np.float32)
    token_ids = rng.integers(0, vocab, 5).tolist()
    right = log_softmax(logits)
    for row, ((token_id, logprob, rank), *top) in enumerate(figures(logits, token_ids, 5)):
        assert token_id == token_ids[row]
        assert logprob == pytest.approx(right[row, token_id], abs=1e-5)
        assert rank == 1 + (logits[row] > logits[row, token_id]).sum()
        assert [top_id for top_id, _, _ in top] == np.argsort(-logits[row], kind="stable")[:5].tolist()
        assert [top_rank for _, _, top_rank in top] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([value for _, value, _ in top], np.sort(right[row])[::-1][:5], atol=1e-5)


def test_as_many_as_each_row_asks_for(figures: Figures) -> None:
    logits = np.float32([[1, 2, 3, 4]] * 3)
    assert [len(row) for row in figures(logits, [0, 1, 2], 4, [0, 4, 2])] == [1, 5, 3]
    assert [len(row) for row in figures(logits, [0, 1, 2], 0, [0, 0, 0])] == [1, 1, 1]


def test_the_whole_vocabulary_adds_up_to_one(figures: Figures) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    [_, (_, *top)] = figures(logits, [0, 0], 50)
    assert sum(np.exp(value) for _, value, _ in top) == pytest.approx(1, abs=1e-5)


def test_equals_have_the_same_rank_and_come_in_order(figures: Figures) -> None:
    logits = np.float32([[5, 7, 7, 9, 7, 1]] * 2)
    [(chosen, *top), (last, *_)] = figures(logits, [4, 5], 6)
    assert chosen[::2] == (4, 2)
    assert last[::2] == (5, 6)
    assert [(token_id, rank) for token_id, _, rank in top] == [(3, 1), (1, 2), (2, 2), (4, 2), (0, 5), (5, 6)]


@pytest.mark.parametrize("rows", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("vocab", [192, 1601])
def test_rows_do_not_matter(figures: Figures, rows: int, vocab: int) -> None:
    """To the last bit."""
    logits = (np.random.default_rng(1).standard_normal((20, vocab)) * 5).astype(np.float32)
    token_ids = list(range(20))
    assert figures(logits[-rows:], token_ids[-rows:], 20) == figures(logits, token_ids, 20)[-rows:]


def test_what_is_excluded_is_left_out(figures: Figures) -> None:
    inf = np.inf
    [(chosen, *top), (excluded, *_)] = figures(np.float32([[-inf, 1, 1, -inf]] * 2), [1, 0], 4)
    assert chosen[1] == pytest.approx(-np.log(2), abs=1e-6)
    assert [token_id for token_id, _, _ in top] == [1, 2]
    assert excluded == (0, LOWEST, 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_never_anything_but_numbers(figures: Figures, value: float) -> None:
    logits = np.float32([[1, 2, 3, 4], [1, value, 3, 4], [value] * 4, [0, 0, 0, 3e38]])
    found = figures(logits, [0, 1, 2, 1], 4)
    json.dumps(found, allow_nan=False)
    assert found[0] == figures(logits[[0, 0]], [0, 0], 4)[0]  # the others have nothing to do with it
