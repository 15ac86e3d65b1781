"""Biases, bans and penalties against numpy, and what the tables on the device remember of a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from noria.batch.edits import MAX_ENTRIES, biases_of, row_edits
from noria.batch.inputs import SampleInputs, ShapingInputs
from noria.config import SamplingParams
from noria.ops.sampling.types import NO_TOKEN
from noria.step.shape import Tables, bad_columns, count, edit, shape

ROWS, VOCAB = 4, 60
_to_float = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)
apply_edit = jax.jit(edit, donate_argnums=0)


def garbage(rows: int = ROWS, vocab: int = VOCAB) -> Tables:
    """What earlier requests may have left."""
    return Tables(jnp.full((rows, vocab), 12345, jnp.int32), jnp.full((rows, vocab), -jnp.inf, jnp.float32))


def occupy(
    tables: Tables, row: int, params: SamplingParams, prompt: list[int], output: list[int], bad: tuple[int, ...] = ()
) -> Tables:
    edits = row_edits(row, params, biases_of(params, bad), prompt + output, len(prompt))
    for packed in edits:
        tables = apply_edit(tables, packed)
    return tables


def neutral(rows: int = ROWS) -> tuple[np.ndarray, ShapingInputs]:
    buffer, shaping = ShapingInputs.allocate(rows)
    shaping.repetition[:] = 1
    for array in (shaping.newest, shaping.tail, shaping.bad):
        array[:] = -1
    shaping.table_row[:] = np.arange(rows)
    return buffer, shaping


@jax.jit
def run(logits: Any, sample: Any, shaping: Any, tables: Tables, sampled: Any) -> Any:
    inputs = SampleInputs.unpack(sample, _to_float)
    return shape(logits, inputs, ShapingInputs.unpack(shaping, _to_float), tables, sampled)


def shaped(logits: np.ndarray, buffer: np.ndarray, tables: Tables, sampled: np.ndarray | None = None) -> np.ndarray:
    sample, _ = SampleInputs.allocate(len(logits))
    sampled = np.zeros(len(logits), np.int32) if sampled is None else sampled
    return np.asarray(run(logits, sample, buffer, tables, sampled))


def oracle(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """One row, in float64, in the order of vLLM: allowed, bad, bias, repetition, frequency, presence."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    x[list(params.bad_token_ids or ())] = -np.inf
    for token, bias in params.biases:
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def use(shaping: ShapingInputs, row: int, params: SamplingParams, has_bias: bool) -> None:
    shaping.presence[row], shaping.frequency[row] = params.presence_penalty, params.frequency_penalty
    shaping.repetition[row], shaping.has_bias[row] = params.repetition_penalty, has_bias


tokens = st.integers(0, VOCAB - 1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.lists(tokens, min_size=1, max_size=30),
    output=st.lists(tokens, max_size=30),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    repetition=st.floats(0.25, 4, width=32),
    bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=6),
    allowed=st.none() | st.lists(tokens, min_size=1, max_size=20),
    bad=st.lists(tokens, max_size=5),
)
def test_against_numpy(seed, prompt, output, presence, frequency, repetition, bias, allowed, bad):
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_token_ids=bad,
    )
    logits = np.random.default_rng(seed).standard_normal((ROWS, VOCAB)).astype(np.float32) * 4
    tables = occupy(garbage(), 2, params, prompt, output)
    buffer, shaping = neutral()
    shaping.table_row[:] = [0, 1, 3, 2]  # the row of the step is not that of the tables
    use(shaping, 3, params, has_bias=bool(bias or bad or allowed is not None))
    found = shaped(logits, buffer, tables)
    np.testing.assert_allclose(found[3], oracle(logits[3], params, prompt, output), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found[:3], logits[:3])


def test_tokens_that_are_sampled_count_at_once():
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    tables = occupy(garbage(), 1, params, [5, 6], [7])
    buffer, shaping = neutral()
    shaping.counts[1] = 1
    counting = jax.jit(lambda tables, buffer, ids: count(tables, ShapingInputs.unpack(buffer, _to_float), ids))
    for ids in ([9, 7, 9, 9], [9, 8, 9, 9], [9, NO_TOKEN, 9, 9], [9, 7, 9, 9]):
        tables = counting(tables, buffer, np.int32(ids))
    expected = np.zeros(VOCAB, np.int32)
    expected[[5, 6, 7, 8]] = [1, 1, 6, 2]
    np.testing.assert_array_equal(tables.counts[1], expected)
    np.testing.assert_array_equal(tables.counts[0], 12345)  # nobody asked to count them
    np.testing.assert_array_equal(tables.bias[0], -np.inf)


def test_more_entries_than_an_edit_holds():
    vocab = 3 * MAX_ENTRIES + 5
    params = SamplingParams(presence_penalty=1.0, logit_bias={i: i / vocab for i in range(0, vocab, 3)})
    prompt, output = list(range(0, vocab, 2)), [*range(MAX_ENTRIES), 3, 3]
    assert len(list(row_edits(0, params, biases_of(params, ()), prompt + output, len(prompt)))) > 3
    tables = occupy(garbage(2, vocab), 0, params, prompt, output)
    times = np.zeros(vocab, int)
    np.add.at(times, output, 1)
    counts = np.asarray(tables.counts[0])
    np.testing.assert_array_equal(counts >> 1, times)
    np.testing.assert_array_equal(counts > 0, (np.arange(vocab) % 2 == 0) | (times > 0))
    expected = np.zeros(vocab, np.float32)
    expected[::3] = np.arange(0, vocab, 3, dtype=np.float32) / vocab
    np.testing.assert_allclose(tables.bias[0], expected, rtol=1e-6)


def test_a_row_that_is_taken_again_forgets():
    tables = occupy(garbage(), 0, SamplingParams(repetition_penalty=2.0, bad_token_ids=[4]), [1, 2, 3], [2])
    tables = occupy(tables, 0, SamplingParams(presence_penalty=1.0, allowed_token_ids=[8, 9]), [5], [6], bad=(9,))
    assert np.flatnonzero(tables.counts[0]).tolist() == [5, 6]
    assert np.flatnonzero(np.isfinite(tables.bias[0])).tolist() == [8]


columns = jax.jit(partial(lambda buffer, sampled: bad_columns(ShapingInputs.unpack(buffer, _to_float), sampled, VOCAB)))


@pytest.mark.parametrize(
    ("tail", "newest", "banned"),
    [
        ([], -1, []),
        ([10], -1, [11]),
        ([3, 10], -1, [11]),
        ([10, 3], -1, []),
        ([20, 21], -1, [22]),
        ([21], -1, []),
        ([21, 20], -1, []),
        ([20, 99], 1, [22]),  # the host does not know that the newest is 21
        ([99], 0, [11]),
        ([1, 2, 3, 4, 5, 6, 7], -1, [8]),
        ([0, 2, 3, 4, 5, 6, 7], -1, []),
    ],
)
def test_bad_sequences_are_not_completed(tail: list[int], newest: int, banned: list[int]):
    buffer, shaping = neutral()
    for place, sequence in enumerate([(10, 11), (20, 21, 22), tuple(range(1, 9))]):
        shaping.bad[1, place, -len(sequence) :] = sequence
    if tail:
        shaping.tail[1, -len(tail) :] = tail
    shaping.newest[1] = newest
    found = np.asarray(columns(buffer, np.int32([10, 21, 0, 0])))
    assert sorted(found[1][found[1] < VOCAB]) == banned
    assert (found[[0, 2, 3]] == VOCAB).all()
    logits = np.zeros((ROWS, VOCAB), np.float32)
    after = shaped(logits, buffer, garbage(), np.int32([10, 21, 0, 0]))
    assert np.argwhere(after == -np.inf).tolist() == [[1, token] for token in banned]


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
def test_the_number_of_rows_does_not_matter(rows: int):
    """To the last bit: the same request in steps of other buckets."""
    rng = np.random.default_rng(rows)
    params = SamplingParams(
        presence_penalty=0.3, frequency_penalty=0.7, repetition_penalty=1.1, logit_bias={3: 0.1, 4: -3.3}
    )
    vocab, output = 500, rng.integers(0, 500, 300).tolist()
    logits = (rng.standard_normal((16, vocab)) * 3).astype(np.float32)

    def one(rows: int, place: int) -> np.ndarray:
        tables = occupy(garbage(16, vocab), 5, params, [1, 2], output)
        buffer, shaping = neutral(rows)
        shaping.table_row[place] = 5
        use(shaping, place, params, has_bias=True)
        mine = np.concatenate([logits[1 : 1 + place], logits[:1], logits[1 + place : rows]])
        return shaped(mine, buffer, tables)[place]

    np.testing.assert_array_equal(one(rows, rows - 1), one(5, 0))
