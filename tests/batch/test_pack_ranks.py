"""The inputs of a step on several ranks: equal widths, local numbers, and the way back to the order of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import cached, resumed, schedule
from batches import new as new_request
from jax import lax

from noria.batch.buckets import Buckets, share
from noria.batch.inputs import BatchShape, ForwardInputs, SampleInputs, ShapingInputs
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import EngineConfig, ModelLimits, SamplingParams
from noria.scheduler.schedule import NewRequest

SHAPE = BatchShape(num_rows=4, num_groups=2, num_blocks=6, num_ranks=3)
BUCKETS = Buckets(tokens=(4, 8, 16), requests=(2, 4))
MAX_MODEL_LEN = 24
to_float = lambda bits: bits.view(np.float32)


def new(name: str, count: int, rank: int, computed: int = 0, params: SamplingParams | None = None) -> NewRequest:
    """`count` tokens to compute after the computed ones; tokens, key and blocks tell requests apart."""
    number = ord(name)
    blocks = [[number, number + 100], [number + 200, number + 300]]
    tokens = range(100 * number, 100 * number + computed + count)
    request = new_request(name, tokens, computed=computed, blocks=blocks, key=number, params=params)
    return NewRequest(**{f: getattr(request, f) for f in request.__slots__} | {"rank": rank})


def packed(*requests: NewRequest, num_steps: int = 1) -> tuple[PersistentBatch, StepInputs]:
    batch = PersistentBatch(SHAPE, MAX_MODEL_LEN)
    counts = {r.request_id: num_steps * (len(r.token_ids) - r.num_computed_tokens) for r in requests}
    plan = schedule(*requests, counts=counts, num_steps=num_steps)
    batch.apply(plan)
    return batch, pack(plan, batch, BUCKETS)


def three_ranks(params: SamplingParams | None = None) -> tuple[PersistentBatch, StepInputs]:
    """In the order of the schedule: rank 1 gets 5 + 1 tokens, rank 0 gets 2 + 1, and rank 2 is idle."""
    return packed(new("b", 5, 1), new("a", 2, 0, 4), new("d", 1, 1, 7, params), new("c", 1, 0, 3, params))


def of_rank(step: StepInputs, rank: int) -> ForwardInputs:
    return ForwardInputs.unpack(step.forward[rank], SHAPE, step.num_tokens // SHAPE.num_ranks)


def test_every_rank_has_the_width_of_the_largest() -> None:
    batch, step = three_ranks()
    assert (step.num_tokens, step.num_rows) == (3 * 8, 3 * 2)
    assert step.forward.shape[0] == step.sample.shape[0] == 3
    assert [batch.row(name) for name in "abcd"] == [0, 4, 1, 5]  # rows of a rank are together
    assert step.rows.tolist() == [1, 0, 5, 4]  # rank by rank, and there decode rows first


def test_what_a_rank_is_told_is_counted_from_its_own_beginning() -> None:
    _, step = three_ranks()
    first, second, idle = (of_rank(step, rank) for rank in range(3))
    a, b, c, d = (100 * ord(name) for name in "abcd")
    assert first.token_ids.tolist() == [c + 3, a + 4, a + 5, 0, 0, 0, 0, 0]
    assert second.token_ids.tolist() == [d + 7, b, b + 1, b + 2, b + 3, b + 4, 0, 0]
    assert first.token_rows.tolist() == [0, 1, 1, 4, 4, 4, 4, 4]
    assert second.positions.tolist() == [7, 0, 1, 2, 3, 4, 0, 0]
    assert first.query_start.tolist() == [0, 1, 3, 3, 3]
    assert second.query_start.tolist() == [0, 1, 6, 6, 6]
    assert first.seq_lens.tolist() == [4, 6, 0, 0]
    assert first.logit_rows.tolist() == [0, 2, 0, 0]
    assert second.logit_rows.tolist() == [0, 5, 0, 0]
    assert first.distribution.tolist() == second.distribution.tolist() == [1, 1, 2]
    assert second.block_tables[0, :2, :2].tolist() == [[ord("d"), ord("d") + 100], [ord("b"), ord("b") + 100]]
    assert not any(array.any() for array in (idle.token_ids, idle.block_tables, idle.seq_lens))
    assert idle.distribution.tolist() == [0, 0, 0]
    assert idle.token_rows.tolist() == [SHAPE.num_rows] * 8


def test_query_starts_are_one_segment_for_each_rank() -> None:
    """So there are max_num_seqs + ranks of them."""
    _, step = three_ranks()
    inputs = ForwardInputs.of_ranks(step.forward, SHAPE)
    assert inputs.query_start.tolist() == [0, 1, 3, 3, 3, 0, 1, 6, 6, 6, 0, 0, 0, 0, 0]
    assert inputs.query_start.shape == (SHAPE.all_rows + SHAPE.num_ranks,)
    assert inputs.token_ids.shape == (step.num_tokens,)
    assert inputs.distribution.tolist() == [1, 1, 2, 1, 1, 2, 0, 0, 0]
    assert inputs.block_tables.shape == (2, SHAPE.all_rows, 6)
    assert inputs.block_tables[1, [0, 1, 4, 5], 0].tolist() == [ord(name) + 200 for name in "cadb"]


def test_the_selector_restores_the_order_of_the_batch() -> None:
    """positions_in_output of the rule: arange(n_r) + r * rows_per_rank, permuted by argsort of the batch indices."""
    _, step = three_ranks()
    assert step.places is not None
    assert step.places.tolist() == [[0, 1, 2, 3]]  # c, a on rank 0; d, b on rank 1; 2 rows each
    batch_index = {1: 3, 0: 1, 5: 2, 4: 0}  # row of the batch -> place in the schedule b, a, d, c
    selector = step.places[0][np.argsort([batch_index[row] for row in step.rows.tolist()])]
    output = np.array(list("cadb??"))  # rank-major, as the device yields it
    assert "".join(output[selector]) == "badc"
    _, step = packed(new("a", 1, 0), new("b", 1, 2), new("c", 3, 2), new("d", 1, 2))
    assert (step.num_rows, step.rows.tolist()) == (12, [0, 8, 10, 9])
    assert step.places is not None
    assert step.places.tolist() == [[0, 8, 9, 10]]


@pytest.mark.parametrize("cls", [SampleInputs, ShapingInputs])
def test_host_and_device_find_the_same_rows(cls: type) -> None:
    params = SamplingParams(temperature=0.5, presence_penalty=0.25, logprobs=1)
    _, step = three_ranks(params)
    buffer = step.sample if cls is SampleInputs else step.shaping
    assert buffer is not None
    assert step.places is not None
    host = cls.of_ranks(buffer, to_float)
    device = jax.jit(
        lambda packed: {
            name: getattr(cls.of_ranks(packed, lambda bits: lax.bitcast_convert_type(bits, jnp.float32)), name)
            for name in [field.name for field in dataclasses.fields(cls)]
        }
    )(buffer)
    for name, array in device.items():
        np.testing.assert_array_equal(array, getattr(host, name))
    at = step.places[0]
    if cls is SampleInputs:
        assert host.position[at].tolist() == [4, 6, 8, 5]
        assert host.key_low[at].tolist() == [ord(name) for name in "cadb"]
        assert host.temperature.tolist() == [0.5, 1.0, 0.5, 1.0, 0.0, 0.0]
        assert host.num_steps.tolist() == [1, 1, 1, 1, 0, 0]  # nobody is on rank 2
    else:
        assert host.presence.tolist() == [0.25, 0, 0.25, 0, 0, 0]
        assert host.scores.tolist() == [1, 0, 1, 0, 0, 0]
        assert host.table_row.tolist() == [1, 0, 1, 0, 0, 0]  # of the tables of its rank


def test_tokens_that_the_host_does_not_know_are_found_by_their_places() -> None:
    requests = [new("a", 1, 0, 3), new("b", 1, 2, 3), new("c", 1, 2, 4)]
    batch, step = packed(*requests)
    assert step.places is not None
    assert step.places.tolist() == [[0, 4, 5]]
    batch.expect(step.rows, step.places[0], np.ones(3, int))
    more = [cached("a", 4), cached("b", 4), cached("c", 5)]
    plan = schedule(*more, counts={"a": 1, "b": 1, "c": 1})
    batch.apply(plan)
    inputs = ForwardInputs.of_ranks(pack(plan, batch, BUCKETS).forward, SHAPE)
    assert inputs.token_sources.reshape(3, 4)[:, :2].tolist() == [[0, -1], [-1, -1], [4, 5]]


def test_a_burst_has_a_token_for_each_row() -> None:
    _, step = packed(new("a", 1, 0, 3), new("b", 1, 2, 3), new("c", 1, 2, 4), num_steps=5)
    assert (step.num_tokens, step.num_rows, step.steps.tolist()) == (6, 6, [5, 5, 5])


def test_prompt_tokens_are_found_in_the_part_of_their_rank() -> None:
    params = SamplingParams(prompt_logprobs=1)
    _, step = packed(new("a", 3, 0), new("b", 4, 2, params=params))
    assert step.prompt is not None
    assert step.prompt.sources.tolist() == [8, 9, 10]  # 4 tokens a rank
    assert step.prompt.token_ids.tolist() == [100 * ord("b") + place for place in (1, 2, 3)]


def test_drafts_are_rows_of_their_rank() -> None:
    shape = BatchShape(num_rows=4, num_groups=2, num_blocks=6, num_drafts=4, num_ranks=2)
    buckets = Buckets(tokens=(8, 16), requests=(4,), with_drafts=(4, 8))
    batch = PersistentBatch(shape, MAX_MODEL_LEN)
    requests = [new("a", 1, 0, 5), new("b", 1, 1, 6), new("c", 1, 1, 7)]
    plan = schedule(*requests, counts={"a": 3, "b": 1, "c": 4})
    plan.draft_token_ids.update({"a": [7, 8], "c": [9, 9, 9]})
    batch.apply(plan)
    step = pack(plan, batch, buckets)
    assert (step.num_tokens, step.num_rows, step.has_drafts) == (16, 16, True)
    assert step.places is not None
    assert step.places.T.tolist() == [[0, 1, 2, -1], [8, -1, -1, -1], [9, 10, 11, 12]]
    second = ForwardInputs.unpack(step.forward[1], shape, 8)
    assert second.logit_rows.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    sample = SampleInputs.of_ranks(step.sample, to_float)
    assert sample.draft.tolist() == [7, 8, -1, *[-1] * 5, -1, 9, 9, 9, -1, *[-1] * 3]
    assert sample.place[8:].tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_a_request_that_comes_back_on_another_rank_has_a_row_there() -> None:
    batch, _ = three_ranks()
    batch.apply(schedule(preempted=["c"]))
    back = resumed("c", range(5), blocks=([1], [2]))._replace(rank=2)
    batch.apply(schedule(back, counts={"c": 5}))
    assert batch.row("c") == 8
    batch.apply(schedule(finished=["c", "a"]))
    batch.apply(schedule(new("e", 1, 0), new("f", 1, 2)))
    assert [batch.row("e"), batch.row("f")] == [0, 8]


@pytest.mark.parametrize(
    ("sizes", "ranks", "each"),
    [
        ((16, 32, 64), 2, (8, 16, 32)),
        ((16, 32, 48, 64), 4, (4, 8, 12, 16)),
        ((8, 16), 8, (2, 2)),  # one row alone would be computed by other code
        ((8, 12), 3, (2, 4)),
    ],
)
def test_a_rank_has_its_share_of_the_buckets(sizes: tuple[int, ...], ranks: int, each: Sequence[int]) -> None:
    assert share(sizes, ranks) == tuple(sorted(set(each)))


def test_buckets_of_a_configuration() -> None:
    config = EngineConfig(model="", data_parallel_size=2, attention_data_parallel_size=2, max_num_seqs=32)
    resolved = config.resolve(ModelLimits(64, 100), "cpu")
    assert Buckets.of(resolved) == Buckets(tokens=(4, 8, 16, 32, 64, 128, 256), requests=(2, 4, 8))
