"""One step's inputs, with the numbers of hand-made examples, and the same on the device after the transfer."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import MAX_MODEL_LEN, SHAPE, batch_of, cached, new, sample, schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape, ForwardInputs, SampleInputs
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams

BUCKETS = Buckets(tokens=(16, 32), requests=(4, 8))


def forward_of(step: StepInputs, shape: BatchShape = SHAPE) -> ForwardInputs:
    return ForwardInputs.unpack(step.forward, shape, step.num_tokens)


def sample_of(step: StepInputs) -> SampleInputs:
    return SampleInputs.unpack(step.sample, lambda bits: bits.view(np.float32))


def packed(batch: PersistentBatch, counts: dict[str, int]) -> StepInputs:
    return pack(schedule(counts=counts), batch, BUCKETS)


@pytest.fixture
def example() -> PersistentBatch:
    """2, 5 and 3 tokens to compute after 4, 0 and 7 computed ones; the last request has more to come."""
    return batch_of(
        new("a", range(100, 106), computed=4, blocks=([1, 2], [3, 4])),
        new("b", range(200, 205), computed=0, blocks=([5], [6])),
        new("c", range(300, 314), computed=7, blocks=([7, 8, 9], [0, 10, 11])),
    )


def test_rows_offsets_and_positions(example: PersistentBatch) -> None:
    step = packed(example, {"a": 2, "b": 5, "c": 3})
    inputs = forward_of(step)
    assert (step.num_tokens, step.num_rows) == (16, 4)
    assert inputs.token_rows.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, *[SHAPE.num_rows] * 6]
    assert inputs.positions.tolist() == [4, 5, 0, 1, 2, 3, 4, 7, 8, 9, *[0] * 6]
    assert inputs.token_ids.tolist() == [104, 105, 200, 201, 202, 203, 204, 307, 308, 309, *[0] * 6]
    assert inputs.query_start.tolist() == [0, 2, 7, 10, 10, 10, 10, 10, 10]
    assert inputs.seq_lens.tolist() == [6, 5, 10, 0, 0, 0, 0, 0]
    assert inputs.logit_rows.tolist()[:3] == [1, 6, 9]
    assert inputs.block_tables[0, :4].tolist() == [[1, 2, *[0] * 4], [5, *[0] * 5], [7, 8, 9, *[0] * 3], [0] * 6]
    assert inputs.block_tables[1, :4].tolist() == [[3, 4, *[0] * 4], [6, *[0] * 5], [0, 10, 11, *[0] * 3], [0] * 6]
    assert not inputs.block_tables[:, 4:].any()
    assert inputs.distribution.tolist() == [0, 0, 3]
    assert step.rows.tolist() == [0, 1, 2]


def test_only_rows_whose_tokens_are_all_computed_sample(example: PersistentBatch) -> None:
    assert packed(example, {"a": 2, "b": 5, "c": 3}).samples.tolist() == [True, True, False]
    assert packed(example, {"a": 1, "b": 4, "c": 7}).samples.tolist() == [False, False, True]


def test_a_last_prefill_chunk_of_one_token_is_a_decode(example: PersistentBatch) -> None:
    example.apply(schedule(cached("c", 13), counts={"c": 1}))
    step = packed(example, {"b": 5, "c": 1})
    assert forward_of(step).distribution.tolist() == [1, 1, 2]
    assert step.rows.tolist() == [2, 0 + 1]
    assert step.samples.tolist() == [True, True]


def test_decode_rows_come_first_and_take_everything_with_them() -> None:
    names = ["p", "d", "q", "e"]
    counts = {"p": 3, "d": 1, "q": 2, "e": 1}
    requests = [
        new(
            name,
            range(100 * index, 100 * index + 8),
            params=SamplingParams(temperature=index + 1, top_k=index + 2, top_p=1 / (index + 1), min_p=index / 10),
            key=index << 33,
            computed=8 - counts[name],
            blocks=([index + 1], [index + 11]),
        )
        for index, name in enumerate(names)
    ]
    step = packed(batch_of(*requests), counts)
    inputs, sample = forward_of(step), sample_of(step)
    order = [1, 3, 0, 2]  # d, e, p, q: those of a kind in the order of the schedule
    assert step.rows.tolist() == order
    assert inputs.distribution.tolist() == [2, 2, 4]
    assert inputs.query_start.tolist() == [0, 1, 2, 5, 7, 7, 7, 7, 7]
    assert inputs.token_ids.tolist()[:7] == [107, 307, 5, 6, 7, 206, 207]
    assert inputs.token_rows.tolist()[:7] == [0, 1, 2, 2, 2, 3, 3]
    assert inputs.block_tables[:, :4, 0].tolist() == [[2, 4, 1, 3], [12, 14, 11, 13]]
    assert inputs.logit_rows.tolist()[:4] == [0, 1, 4, 6]
    assert sample.temperature.tolist() == [2, 4, 1, 3]
    assert sample.top_k.tolist() == [3, 5, 2, 4]
    np.testing.assert_array_equal(sample.top_p, np.float32([1 / 2, 1 / 4, 1, 1 / 3]))
    np.testing.assert_array_equal(sample.min_p, np.float32([0.1, 0.3, 0, 0.2]))
    assert sample.key_high.tolist() == [2, 6, 0, 4]
    assert sample.position.tolist() == [8] * 4


def test_a_request_of_the_batch_that_is_not_scheduled_takes_no_row(example: PersistentBatch) -> None:
    step = packed(example, {"c": 2})
    assert step.rows.tolist() == [2]
    assert forward_of(step).token_ids.tolist() == [307, 308, *[0] * 14]
    assert not forward_of(step).block_tables[:, 1:].any()


def test_the_order_of_the_schedule_is_kept_among_equals(example: PersistentBatch) -> None:
    assert packed(example, {"c": 2, "a": 2, "b": 2}).rows.tolist() == [2, 0, 1]


def test_nothing_of_a_bigger_step_before_reaches_a_smaller_one(example: PersistentBatch) -> None:
    """Neither ids, positions, blocks nor sampling parameters, in a batch whose rows have been full."""
    longest = new("long", range(1, 1 + MAX_MODEL_LEN), blocks=(range(1, 7), range(7, 13)))
    params = SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.5, min_tokens=2)
    others = [new(str(i), [50 + i], params=params, stops=[1, 2], key=2**64 - 1) for i in range(7)]
    batch = batch_of(longest, *others)
    big = pack(schedule(counts={"long": 24, **{str(i): 1 for i in range(7)}}), batch, BUCKETS)
    assert (big.num_tokens, big.num_rows) == (32, 8)
    batch.apply(schedule(finished=["long", *map(str, range(7))]))
    batch.apply(schedule(new("small", [9], params=SamplingParams(temperature=0), blocks=([3], [4]))))
    step = packed(batch, {"small": 1})
    inputs, sample = forward_of(step), sample_of(step)
    assert inputs.token_ids.tolist() == [9] + [0] * 15
    assert inputs.positions.tolist() == [0] * 16
    assert inputs.token_rows.tolist() == [0] + [SHAPE.num_rows] * 15
    assert inputs.seq_lens.tolist() == [1] + [0] * 7
    assert inputs.block_tables[0].ravel().nonzero()[0].tolist() == [0]
    assert inputs.block_tables[1].ravel().nonzero()[0].tolist() == [0]
    for field in ("temperature", "min_p", "top_k", "num_stops"):
        assert not getattr(sample, field).any(), field
    assert sample.key_low.tolist() == sample.key_high.tolist() == [0] * 4


def test_padding_rows_are_greedy_and_ban_nothing(example: PersistentBatch) -> None:
    sample = sample_of(packed(example, {"a": 2, "b": 5, "c": 3}))
    assert sample.temperature.tolist() == [1, 1, 1, 0]
    for field in ("temperature", "top_k", "min_p", "num_stops", "banned_until", "position", "key_low", "key_high"):
        assert getattr(sample, field)[3] == 0, field
    assert sample.num_steps.tolist() == [1, 1, 1, 0]


def test_an_exactly_full_step_has_no_padding() -> None:
    batch = batch_of(*(new(str(i), [10 + i] * 4) for i in range(4)))
    step = packed(batch, {str(i): 4 for i in range(4)})
    inputs = forward_of(step)
    assert (step.num_tokens, step.num_rows) == (16, 4)
    assert inputs.token_rows.tolist() == [i for i in range(4) for _ in range(4)]
    assert inputs.query_start.tolist() == [0, 4, 8, 12, 16, 16, 16, 16, 16]
    assert inputs.logit_rows.tolist()[:4] == [3, 7, 11, 15]


def test_stop_tokens_are_banned_until_min_tokens_are_generated() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=5)
    batch = batch_of(new("a", [1, 2, 3], params=params, stops=[9, 7]))
    banned = []
    for computed in (0, 3, 4, 5):
        batch.apply(schedule(cached("a", computed)))
        inputs = sample_of(packed(batch, {"a": 3 if computed == 0 else 1}))
        assert inputs.stops[0, : inputs.num_stops[0]].tolist() == [7, 9]
        banned.append(bool(inputs.position[0] < inputs.banned_until[0]))
        sample(batch, {0: 20})
    assert banned == [True, True, False, False]  # the first two tokens may not end it


def test_tokens_still_being_sampled_are_taken_from_the_step_before(example: PersistentBatch) -> None:
    """Only as the newest token of a row, wherever the row comes to stand."""
    step = packed(example, {"b": 5, "a": 2, "c": 3})
    assert forward_of(step).token_sources.tolist() == [-1] * 16
    # b in row 0 of the step, a in row 1
    example.expect(step.rows[step.samples], np.flatnonzero(step.samples), step.steps[step.samples])
    example.apply(schedule(cached("a", 6), cached("b", 5), cached("c", 10)))
    step = packed(example, {"a": 1, "b": 1, "c": 3})
    inputs = forward_of(step)
    assert step.rows.tolist() == [0, 1, 2]
    assert inputs.token_sources.tolist() == [1, 0] + [-1] * 14
    assert inputs.token_ids.tolist()[2:5] == [310, 311, 312]
    assert step.samples.tolist() == [True, True, False]
    example.apply(schedule(cached("a", 4)))
    assert forward_of(packed(example, {"a": 3})).token_sources.tolist() == [-1, -1, 1] + [-1] * 13
    example.apply(schedule(cached("c", 13)))
    last = packed(example, {"c": 1})
    assert forward_of(last).token_sources.tolist() == [-1] * 16
    assert last.samples.tolist() == [True]


def test_a_burst_is_packed_as_its_first_pass(example: PersistentBatch) -> None:
    example.apply(schedule(cached("a", 5), cached("b", 4), cached("c", 13)))
    counts = {"a": 3, "b": 1, "c": 4}
    step = pack(schedule(counts=counts, num_steps=4), example, BUCKETS)
    inputs, sample = forward_of(step), sample_of(step)
    assert step.is_burst
    assert (step.num_tokens, step.num_rows) == (4, 4)  # one token of each row, padded like the rows
    assert inputs.token_ids.tolist() == [105, 204, 313, 0]
    assert inputs.positions.tolist() == [5, 4, 13, 0]
    assert inputs.token_rows.tolist() == [0, 1, 2, SHAPE.num_rows]
    assert inputs.seq_lens.tolist()[:4] == [6, 5, 14, 0]
    assert inputs.distribution.tolist() == [3, 3, 3]
    assert step.samples.tolist() == [True] * 3
    assert step.steps.tolist() == [3, 1, 4]
    assert sample.position.tolist() == [6, 5, 14, 0]
    assert sample.num_steps.tolist() == [3, 1, 4, 0]


def test_the_step_after_a_burst_goes_on_behind_its_last_token(example: PersistentBatch) -> None:
    example.apply(schedule(cached("a", 5), cached("b", 4)))
    step = pack(schedule(counts={"b": 4, "a": 2}, num_steps=4), example, BUCKETS)
    expected = example.expect(step.rows, np.arange(2), step.steps)
    example.apply(schedule(cached("a", 7), cached("b", 8)))
    after = packed(example, {"a": 1, "b": 1})
    assert forward_of(after).positions.tolist()[:2] == [7, 8]
    assert forward_of(after).token_sources.tolist()[:2] == [1, 0]
    assert after.samples.tolist() == [True, True]
    example.fulfil(expected, np.array([[10, 20], [11, 21], [12, -2], [13, -2]]))
    assert example.token_ids[0, 6:9].tolist() == [20, 21, 0]
    assert example.token_ids[1, 5:9].tolist() == [10, 11, 12, 13]
    after = packed(example, {"a": 1, "b": 1})
    assert forward_of(after).token_ids.tolist()[:2] == [21, 13]
    assert forward_of(after).token_sources.tolist()[:2] == [-1, -1]


@given(st.data())
@settings(max_examples=25)
def test_the_device_finds_what_the_host_packed(data: st.DataObject) -> None:
    """To the last bit: floats (subnormal ones too) and 64-bit keys travel as int32."""
    count = data.draw(st.integers(1, 8))
    floats = st.floats(0, 1, width=32, exclude_min=True, allow_subnormal=True)
    requests, counts = [], {}
    for index in range(count):
        params = SamplingParams(
            temperature=data.draw(st.floats(0, 2.0**127, width=32)),
            top_p=data.draw(floats),
            min_p=data.draw(floats),
            top_k=data.draw(st.integers(0, 2**31 - 1)),
        )
        length = data.draw(st.integers(1, 4))
        key = data.draw(st.integers(0, 2**64 - 1))
        tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
        requests.append(new(str(index), tokens, params=params, key=key, blocks=([index + 1], [2**31 - 1])))
        counts[str(index)] = length
    step = packed(batch_of(*requests), counts)
    forward, sample = on_device(step.forward, step.sample, step.num_tokens)
    for name, array in vars_of(forward_of(step)).items():
        np.testing.assert_array_equal(getattr(forward, name), array, err_msg=name)
    bits = lambda array: np.asarray(array).view(np.int32)
    for name, array in vars_of(sample_of(step)).items():
        np.testing.assert_array_equal(bits(getattr(sample, name)), bits(array), err_msg=name)
    halves = np.stack([sample.key_low[:count], sample.key_high[:count]], axis=1)
    found = np.ascontiguousarray(halves).view(np.uint64)[:, 0].tolist()
    assert found == [requests[row].key for row in step.rows]


@functools.partial(jax.jit, static_argnames="num_tokens")
def unpack(forward: jax.Array, sample: jax.Array, num_tokens: int) -> tuple[dict, dict]:
    assert ForwardInputs.num_tokens(forward.shape[0], SHAPE) == num_tokens
    to_float = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)
    return vars_of(ForwardInputs.unpack(forward, SHAPE, num_tokens)), vars_of(SampleInputs.unpack(sample, to_float))


def on_device(forward: np.ndarray, sample: np.ndarray, num_tokens: int) -> tuple[ForwardInputs, SampleInputs]:
    first, second = unpack(forward, sample, num_tokens)
    return ForwardInputs(**first), SampleInputs(**second)


def vars_of(inputs: ForwardInputs | SampleInputs) -> dict:
    return {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}


@pytest.mark.parametrize("num_tokens", [16, 32, 100])
def test_the_buffer_size_tells_the_token_bucket(num_tokens: int) -> None:
    buffer, _ = ForwardInputs.allocate(SHAPE, num_tokens)
    assert ForwardInputs.num_tokens(buffer.size, SHAPE) == num_tokens


def test_pack_allocates_what_the_buckets_need() -> None:
    """A decode step of a few rows must not copy the token ids of the whole batch (4 MiB here)."""
    shape = BatchShape(num_rows=256, num_groups=1, num_blocks=256)
    batch = batch_of(
        *(new(str(i), range(50), blocks=([1, 2, 3],)) for i in range(200)), shape=shape, max_model_len=4096
    )
    buckets = Buckets(tokens=(16, 32, 1024), requests=(8, 16, 256))
    step_schedule = schedule(counts={str(i): 1 for i in range(20, 30)})
    step = pack(step_schedule, batch, buckets)
    assert (step.num_tokens, step.num_rows) == (16, 16)
    assert step.forward.dtype == step.sample.dtype == np.int32
    assert step.forward.size == 4 * 16 + 257 + 2 * 256 + 256 * 256 + 3
    assert step.sample.size == 16 * (12 + SampleInputs.MAX_STOPS)
    tracemalloc.start()
    pack(step_schedule, batch, buckets)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * (step.forward.nbytes + step.sample.nbytes)


def test_a_step_that_breaks_the_budget_is_refused(example: PersistentBatch) -> None:
    with pytest.raises(ValueError, match="does not fit the largest bucket"):
        pack(schedule(counts={"a": 2, "b": 5, "c": 3}), example, Buckets(tokens=(8,), requests=(8,)))
    with pytest.raises(ValueError, match="does not fit the largest bucket"):
        pack(schedule(counts={"a": 2, "b": 5, "c": 3}), example, Buckets(tokens=(16,), requests=(2,)))
