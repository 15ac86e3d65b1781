"""The sampling op against a plain numpy one: what may be drawn, how often, and that a row depends on itself alone."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from noria.batch.inputs import SampleInputs
from noria.ops import native
from noria.ops.sampling import cpu, xla
from noria.ops.sampling.api import Sample
from noria.ops.sampling.types import NO_TOKEN, NOTHING_ALLOWED

ROWS = 8
LIBRARY = native.load()
PATHS = LIBRARY.paths if isinstance(LIBRARY, native.NativeLibrary) else ()
OPS = {"xla": xla.sample} | {path: jax.tree_util.Partial(cpu.sample, path=path) for path in PATHS}


class Draw:
    """Tokens that an op samples."""

    def __init__(self, op: Sample) -> None:
        def run(logits, packed, banned, rows, num_tokens):
            inputs = SampleInputs.unpack(packed, lambda bits: lax.bitcast_convert_type(bits, np.float32))
            return op(logits, inputs, banned, rows, num_tokens=num_tokens)

        self._run: Callable = jax.jit(run, static_argnames="num_tokens")

    def __call__(self, logits, settings, *, num_tokens=None, num_rows=ROWS):
        """settings: one dictionary per row, with fields of SampleInputs and `seed`; logits [rows, V] or [V]."""
        buffer, inputs = SampleInputs.allocate(ROWS)
        vocab = logits.shape[-1]
        full = np.full((ROWS, vocab), -1.0, np.float32)
        full[: len(settings)] = logits
        banned = np.full((ROWS, 4), vocab, np.int32)
        for row, values in enumerate(settings):
            inputs.top_p[row] = values.get("top_p", 1.0)
            for name in ("temperature", "min_p", "top_k", "position"):
                getattr(inputs, name)[row] = values.get(name, 0)
            inputs.key_low[row], inputs.key_high[row] = values.get("seed", 0), values.get("seed_high", 0)
            banned[row, : len(values.get("banned", ()))] = values.get("banned", ())
        tokens = self._run(full, buffer, banned, np.int32(num_rows), num_tokens=num_tokens or vocab)
        return np.asarray(tokens)[: len(settings)]

    def many(self, logits, count=4000, **settings):
        """Draws at `count` positions."""
        starts = range(0, count, ROWS)
        return np.concatenate(
            [self(logits, [settings | {"position": at + row} for row in range(ROWS)]) for at in starts]
        )


@pytest.fixture(scope="module", params=OPS)
def draw(request) -> Draw:
    return Draw(OPS[request.param])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_token(draw, temperature):
    """Excluded by the request, or broken by the model: beside rows that are neither."""
    logits = np.zeros((4, 3), np.float32)
    logits[1, 2], logits[2, 0] = np.nan, np.inf
    rows = [{"banned": [0, 1, 2]}, {}, {}, {"banned": [0, 2]}]
    found = draw(logits, [{"temperature": temperature, **row} for row in rows])
    assert found.tolist() == [NOTHING_ALLOWED, NO_TOKEN, NO_TOKEN, 1]


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities [V] by sorting, in float64: temperature, then top-k, top-p (renormalized), min-p; ties are kept."""
    x = np.asarray(logits, np.float64) / temperature
    if 0 < top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    if top_p < 1:
        order = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(order), top_p)
        p = np.where(p >= order[min(last, len(order) - 1)], p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


LOGITS = np.random.default_rng(3).standard_normal(40).astype(np.float32) * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution(draw, settings):
    expected = allowed(LOGITS, **settings)
    tokens = draw.many(LOGITS, seed=11, **settings)
    found = np.bincount(tokens, minlength=40) / len(tokens)
    assert not found[expected == 0].any(), "a filtered token was drawn"
    # The expected distance of n draws is about sqrt(k / (2 pi n)) at most: 0.04 for 40 tokens and 4000 draws.
    assert np.abs(found - expected).sum() / 2 < 0.05


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    spread=st.floats(0.1, 30),
)
def test_never_draws_what_the_filters_exclude(draw, seed, temperature, top_k, top_p, min_p, spread):
    logits = np.random.default_rng(seed).standard_normal(40).astype(np.float32) * np.float32(spread)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # Values that round differently in float32 and float64 may fall on either side: widen each filter by a hair.
    wide = options | {"top_p": min(1.0, top_p + 1e-5), "min_p": max(0.0, min_p - 1e-5)}
    possible = np.flatnonzero(allowed(logits, **wide))
    tokens = draw(logits, [options | {"seed": seed, "position": row} for row in range(ROWS)])
    assert set(tokens) <= set(possible)


def test_greedy_takes_the_first_of_equals(draw):
    assert draw(np.float32([1, 3, 3, 2]), [{}]) == [1]


def test_a_row_does_not_depend_on_its_neighbours(draw):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((ROWS, 300)).astype(np.float32) * 3
    rows = [
        {},
        {"temperature": 0.7, "seed": 1, "position": 3},
        {"temperature": 1.0, "seed": 2, "top_k": 4},
        {"temperature": 1.0, "seed": 2, "top_p": 0.5, "position": 9},
        {"temperature": 2.0, "seed": 3, "min_p": 0.2},
        {},
        {"temperature": 1e-4, "seed": 4},
        {"temperature": 1.0, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ]
    together = draw(logits, rows)
    alone = [draw(logits[row : row + 1], [rows[row]])[0] for row in range(ROWS)]
    assert together.tolist() == alone
    assert together[0] == logits[0].argmax()


def test_randomness_is_a_function_of_key_and_position(draw):
    row = {"temperature": 1.0, "seed": 7, "position": 5}
    variants = [row, {**row, "seed": 8}, {**row, "seed_high": 1}, {**row, "position": 6}]
    flat = np.zeros(5000, np.float32)
    tokens = draw(flat, variants)
    assert len(set(tokens)) == 4
    assert draw(flat, variants[::-1]).tolist() == tokens.tolist()[::-1]


def test_banned_tokens_are_never_sampled(draw):
    logits = np.float32([5, 4, 3, 2, 1])
    rows = [{"banned": (0, 1)}, {}, {"temperature": 1e-3, "banned": (0,), "seed": 1}]
    assert draw(logits, rows).tolist() == [2, 0, 1]


def test_vocabulary_padding_is_never_sampled(draw):
    logits = np.float32([1, 2, 3, 9, 9])
    rows = [{}, {"temperature": 5.0, "seed": 1}, {"temperature": 5.0, "seed": 2, "top_p": 0.99}]
    assert draw(logits, rows, num_tokens=3).max() <= 2


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(draw, temperature):
    tokens = draw(LOGITS, [{"temperature": temperature, "seed": row} for row in range(ROWS)])
    assert ((tokens >= 0) & (tokens < 40)).all()
    if temperature < 1:
        assert (tokens == LOGITS.argmax()).all()


def test_ties_at_the_border_are_all_kept(draw):
    logits = np.float32([2, 1, 1, 1, 0])
    assert set(draw.many(logits, 400, temperature=1.0, top_k=2)) == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def reference() -> Draw:
    return Draw(xla.sample)


def test_noise_is_that_of_jax(draw):
    """With equal logits the token drawn is the one with the most noise."""
    for seed, position in ((3, 0), (-5, 70), (2**31 - 1, 4095)):
        words = np.array([9, seed], np.int64).astype(np.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        noise = jax.random.gumbel(key, (7001,), np.float32)
        row = {"temperature": 1.0, "seed": seed, "seed_high": 9, "position": position}
        assert draw(np.zeros(7001, np.float32), [row]) == [int(np.argmax(noise))]


@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
@pytest.mark.parametrize("vocab", [5, 97, 20000])
def test_every_back_end_draws_the_same(draw, reference, vocab, spread):
    rng = np.random.default_rng(vocab)
    for turn in range(12):
        logits = rng.standard_normal((ROWS, vocab)).astype(np.float32) * np.float32(spread)
        logits[:, rng.integers(vocab)] = -np.inf
        rows = [
            {
                "temperature": float(rng.choice([0.0, 0.4, 1.0, 2.0])),
                "top_k": int(rng.choice([0, 0, 1, 40, vocab])),
                "top_p": float(rng.choice([1.0, 0.95, 0.5, 1e-9])),
                "min_p": float(rng.choice([0.0, 0.0, 0.03])),
                "seed": turn,
                "position": int(rng.integers(4096)),
                "banned": rng.integers(0, vocab + 1, rng.integers(4)).tolist(),
            }
            for _ in range(ROWS)
        ]
        assert draw(logits, rows).tolist() == reference(logits, rows).tolist()


def test_rows_that_do_not_count_do_no_harm(draw):
    logits = np.stack([LOGITS, np.full(40, np.nan, np.float32)])
    assert draw(logits, [{}, {}], num_rows=1)[0] == LOGITS.argmax()
