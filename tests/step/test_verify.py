"""Which sampled tokens count: that drafts decide how many come at a time, and nothing else."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from noria.batch.inputs import NOT_SAMPLED, SampleInputs
from noria.ops.sampling import xla
from noria.step.verify import accept, count_drafts

VOCAB = 8
NONE = NOT_SAMPLED
_to_float = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)


def rows_of(drafts: list[list[int]], padding: int = 0) -> tuple[np.ndarray, SampleInputs]:
    """The rows of requests with these drafts."""
    rows = sum(map(len, drafts)) + len(drafts)
    buffer, inputs = SampleInputs.allocate(rows + padding)
    inputs.draft[:] = -1
    inputs.top_p[:] = 1
    row = 0
    for tokens in drafts:
        inputs.draft[row : row + len(tokens)] = tokens
        inputs.place[row : row + len(tokens) + 1] = np.arange(len(tokens) + 1)
        row += len(tokens) + 1
    inputs.num_steps[:rows] = 1
    return buffer, inputs


def plain_sample(logits: jax.Array, inputs: SampleInputs) -> jax.Array:
    rows = logits.shape[0]
    return xla.sample(logits, inputs, jnp.zeros((rows, 0), jnp.int32), jnp.int32(rows), num_tokens=VOCAB)


@jax.jit
def accepted(token_ids: Any, packed: Any) -> Any:
    return accept(token_ids, SampleInputs.unpack(packed, _to_float))


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [
        ([[5, 6]], [5, 6, 7], [5, 6, 7]),  # all right, and one more
        ([[5, 6]], [5, 9, 7], [5, 9, NONE]),  # the wrong one is replaced
        ([[5, 6]], [9, 6, 7], [9, NONE, NONE]),
        ([[], [], []], [1, 2, 3], [1, 2, 3]),
        ([[5], [5], []], [4, 5, 5, 6, 5], [4, NONE, 5, 6, 5]),  # another's wrong draft is no concern of mine
        ([[5, 6], [7]], [-1, 6, 7, 7, -1], [-1, NONE, NONE, 7, -1]),  # NO_TOKEN is no draft
    ],
)
def test_examples(drafts: list[list[int]], sampled: list[int], expected: list[int]) -> None:
    buffer, _ = rows_of(drafts)
    assert np.asarray(accepted(np.array(sampled, np.int32), buffer)).tolist() == expected


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_request_alone(drafts: list[list[int]], rng: Any) -> None:
    """In a batch as by itself, whatever the others and the padding are."""
    size = 24
    buffer, _ = rows_of(drafts, size - sum(map(len, drafts)) - len(drafts))
    sampled = np.array([rng.randrange(3) for _ in range(size)], np.int32)
    found, row = np.asarray(accepted(sampled, buffer)), 0
    for tokens in drafts:
        mine = sampled[row : row + len(tokens) + 1].tolist()
        right = next((place for place, token in enumerate(tokens) if token != mine[place]), len(tokens))
        assert found[row : row + len(mine)].tolist() == mine[: right + 1] + [NONE] * (len(tokens) - right)
        row += len(mine)


def test_drafts_before_a_row_are_counted_as_generated() -> None:
    buffer, _ = rows_of([[3, 3, 5], [], [1]], padding=1)
    counts = np.arange(8 * VOCAB, dtype=np.int32).reshape(8, VOCAB)
    found = jax.jit(lambda counts, packed: count_drafts(counts, SampleInputs.unpack(packed, _to_float)))(counts, buffer)
    expected = counts.copy()
    for row, before in enumerate([[], [3], [3, 3], [3, 3, 5], [], [], [1], []]):
        np.add.at(expected[row], before, 2)
    assert np.asarray(found).tolist() == expected.tolist()


@partial(jax.jit, static_argnums=2)
def bursts(logits: Any, packed: Any, count: int) -> Any:
    """`count` requests with the same logits and drafts, and keys of their own; rows as of accept."""
    rows = logits.shape[0]

    def one(key: Any) -> Any:
        inputs = SampleInputs.unpack(packed, _to_float)
        inputs = dataclasses.replace(inputs, key_low=jnp.full((rows,), key), position=10 + inputs.place)
        return accept(plain_sample(logits, inputs), inputs)

    return lax.map(one, jnp.arange(count))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.9)])
def test_the_distribution_is_the_model_s(temperature: float, top_k: int, top_p: float) -> None:
    """50,000 draws; drafts that are likely, and that are impossible."""
    logits = np.random.default_rng(3).normal(size=(3, VOCAB)).astype(np.float32) * 1.5
    likely = int(logits[0].argmax())
    buffer, inputs = rows_of([[likely, int(logits[1].argmin())]])
    inputs.temperature[:], inputs.top_k[:], inputs.top_p[:] = temperature, top_k, top_p
    found = np.asarray(bursts(logits, buffer, 50_000))
    for place in range(2):
        expected = probabilities(logits[place], temperature, top_k, top_p)
        drawn = found[found[:, place] != NONE, place]
        shares = np.bincount(drawn, minlength=VOCAB) / len(drawn)
        assert abs(shares - expected).sum() / 2 < 0.02
    # The second token came whenever the first was the draft: as often as the model says it.
    share = probabilities(logits[0], temperature, top_k, top_p)[likely]
    assert np.mean(found[:, 1] != NONE) == pytest.approx(share, abs=0.01)


@partial(jax.jit, static_argnums=3)
def drafted_bursts(logits: Any, guesses: Any, packed: Any, count: int) -> Any:
    """As bursts, with drafts that are drawn from logits of another model, with the same noise."""
    rows = logits.shape[0]

    def one(key: Any) -> Any:
        inputs = SampleInputs.unpack(packed, _to_float)
        inputs = dataclasses.replace(inputs, key_low=jnp.full((rows,), key), position=10 + inputs.place)
        drafts = jnp.where(inputs.place < rows - 1, plain_sample(guesses, inputs), -1)
        return accept(plain_sample(logits, inputs), dataclasses.replace(inputs, draft=drafts))

    return lax.map(one, jnp.arange(count))


FILTERS = [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.9)]
DRAWS = [(temperature, *each) for temperature in (0.5, 1.0, 1.5) for each in FILTERS]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [pytest.param(*draw, marks=[] if draw == (1.0, 6, 0.9) else pytest.mark.slow) for draw in DRAWS],
)
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_the_distribution_when_models_draft(method: str, temperature: float, top_k: int, top_p: float) -> None:
    """50,000 draws; drafts that depend on the noise that the model draws with: of a model like it, and of a head that
    lacks a part of the vocabulary, the second likeliest token included."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32) * 0.6
    guesses = logits + 0.3 * rng.normal(size=(3, VOCAB)).astype(np.float32)
    if method == "eagle3":
        guesses[:, logits[0].argsort()[[-2, 0]]] = -np.inf
    buffer, inputs = rows_of([[0, 0]])
    inputs.temperature[:], inputs.top_k[:], inputs.top_p[:] = temperature, top_k, top_p
    found = np.asarray(drafted_bursts(logits, guesses, buffer, 50_000))
    assert 0.1 < np.mean(found[:, 1] != NONE) < 1
    for place in range(2):
        drawn = found[found[:, place] != NONE, place]
        expected = probabilities(logits[place], temperature, top_k, top_p)
        shares = np.bincount(drawn, minlength=VOCAB) / len(drawn)
        # Of the second token there are fewer draws, the fewer the worse the drafts.
        assert abs(shares - expected).sum() / 2 < 0.02 * max(1, np.sqrt(20_000 / len(drawn)))


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    x = logits.astype(np.float64) / temperature
    if top_k:
        x[np.argsort(x)[:-top_k]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(np.cumsum(p[order]), top_p * (1 - 1e-12)) + 1]
    return np.where(np.isin(np.arange(VOCAB), kept), p, 0) / p[kept].sum()


@jax.jit
def drawn(logits: Any, packed: Any) -> tuple[Any, Any]:
    """What is sampled in each row, and what of it counts."""
    inputs = SampleInputs.unpack(packed, _to_float)
    token_ids = plain_sample(logits, inputs)
    return token_ids, accept(token_ids, inputs)


def test_who_drafts_with_the_same_logits_and_noise_is_always_right() -> None:
    logits = np.random.default_rng(5).normal(size=(3, VOCAB)).astype(np.float32)
    buffer, inputs = rows_of([[0, 0]])
    inputs.temperature[:] = 1
    inputs.position[:] = 10 + inputs.place
    seen = set()
    for key in range(40):
        inputs.key_low[:] = key
        draft, _ = drawn(logits, buffer)
        inputs.draft[:2] = draft[:2]
        again, counts = drawn(logits, buffer)
        assert np.asarray(counts).tolist() == np.asarray(again).tolist() == np.asarray(draft).tolist()
        seen.add(tuple(np.asarray(draft).tolist()))
    assert len(seen) > 20
