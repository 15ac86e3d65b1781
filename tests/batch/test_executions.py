"""Steps of short and long requests: which rows pass in which shape, and that nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from batches import MAX_MODEL_LEN, SHAPE, batch_of, cached, new, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.batch.buckets import Buckets
from noria.batch.executions import Execution
from noria.batch.inputs import BatchShape, ForwardInputs, SampleInputs
from noria.batch.pack import StepInputs, pack
from noria.config import SamplingParams
from noria.scheduler.schedule import NewRequest, Schedule

# Blocks of 4 tokens: tables of 2 in 8 rows, and of 6 in 2 rows.
TWO = SHAPE.divided(8, block_size=4)
BUCKETS = Buckets(tokens=(16, 64, 256), requests=(4, 8), with_drafts=(4, 8, 16))


def request(name: str, length: int, computed: int, prompt_logprobs: int | None = None) -> NewRequest:
    """Its tokens and blocks say whose they are."""
    first = 100 * (ord(name) - ord("a"))
    blocks = range(first + 1, first + 1 + -(-length // 4))
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    ids = range(first, first + length)
    return new(name, ids, params=params, computed=computed, blocks=(blocks, [50 + block for block in blocks]))


def packed(
    requests: Sequence[NewRequest], shape: BatchShape = TWO, drafts: Mapping[str, list[int]] | None = None
) -> StepInputs:
    """Everything that is not computed is scheduled, and the drafts."""
    drafts = drafts or {}
    counts = {
        r.request_id: len(r.token_ids) - r.num_computed_tokens + len(drafts.get(r.request_id, ())) for r in requests
    }
    plan = Schedule(new_requests=tuple(requests), num_scheduled_tokens=counts, draft_token_ids=dict(drafts))
    batch = batch_of(shape=shape)
    batch.apply(plan)
    return pack(plan, batch, BUCKETS)


def shape_of(execution: Execution, shape: BatchShape = TWO) -> BatchShape:
    return (shape.long or shape) if execution.is_long else shape


def view(execution: Execution, shape: BatchShape = TWO) -> ForwardInputs:
    return ForwardInputs.unpack(execution.forward, shape_of(execution, shape), execution.num_tokens)


def names(execution: Execution) -> str:
    """Whose tables the pass has, in its order."""
    inputs = view(execution)
    return "".join(chr(ord("a") + first // 100) for first in inputs.block_tables[0, : inputs.distribution[2], 0])


def owned(step: StepInputs) -> list[list[int]]:
    return [np.flatnonzero(each.owned).tolist() for each in step.executions if each.owned is not None]


def test_the_long_shape_has_fewer_and_longer_tables() -> None:
    assert (TWO.num_rows, TWO.num_blocks, TWO.table_size) == (8, 2, 6)
    assert TWO.long is not None
    assert (TWO.long.num_rows, TWO.long.num_blocks, TWO.long.table_size) == (2, 6, 6)
    drafting = BatchShape(num_rows=8, num_groups=1, num_blocks=6, num_drafts=5).divided(9, block_size=4)
    assert drafting.long is not None
    assert (drafting.num_blocks, drafting.long.num_rows) == (3, 4)
    assert drafting.num_logit_rows == drafting.long.num_logit_rows == 13
    tiny = BatchShape(num_rows=2, num_groups=1, num_blocks=100).divided(4, block_size=4)
    assert tiny.long is not None
    assert tiny.long.num_rows == 1


def test_short_requests_pass_together_in_the_short_shape() -> None:
    step = packed([request(name, 8, 7) for name in "abcdefgh"])
    [only] = step.executions
    assert (only.is_long, only.owned, only.num_tokens) == (False, None, 16)
    assert only.forward is step.forward
    assert view(only).block_tables.shape == (2, 8, 2)


@pytest.mark.parametrize(("length", "is_long"), [(8, False), (9, True)])
def test_a_request_is_long_by_the_tokens_that_it_has_after_the_step(length: int, is_long: bool) -> None:
    [only] = packed([request("a", length, 3)]).executions
    assert only.is_long is is_long


def test_few_requests_of_which_one_is_long_pass_together_in_the_long_shape() -> None:
    step = packed([request("a", 24, 23), request("b", 5, 2)])
    [only] = step.executions
    assert (only.is_long, only.owned) == (True, None)
    inputs = view(only)
    assert inputs.block_tables[0].tolist() == [[1, 2, 3, 4, 5, 6], [101, 102, 0, 0, 0, 0]]
    assert inputs.seq_lens.tolist() == [24, 5]
    assert inputs.token_rows.tolist() == [0, 1, 1, 1] + [2] * 12
    assert inputs.logit_rows.tolist() == [0, 3] + [0] * 6


def test_a_step_that_is_more_than_a_shape_holds_is_divided() -> None:
    """Decodes first, as ever; the place of a row in the head pass is its place in the step."""
    lengths = {"a": (20, 19), "b": (6, 2), "c": (24, 20), "d": (3, 2), "e": (9, 8), "f": (8, 0)}
    step = packed([request(name, *each) for name, each in lengths.items()])
    assert step.rows.tolist() == [0, 3, 4, 1, 2, 5]  # a d e, b c f
    assert [each.is_long for each in step.executions] == [False, True, True]
    assert [names(each) for each in step.executions] == ["dbf", "ae", "c"]
    assert owned(step) == [[1, 3, 5], [0, 2], [4]]
    short, first, second = map(view, step.executions)
    assert short.query_start.tolist() == [0, 1, 5, 13, 13, 13, 13, 13, 13]
    assert short.logit_rows.tolist() == [0, 0, 0, 4, 0, 12, 0, 0]
    assert short.distribution.tolist() == [1, 1, 3]
    assert first.logit_rows.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert first.distribution.tolist() == [2, 2, 2]
    assert first.token_ids[:3].tolist() == [19, 408, 0]
    assert second.logit_rows.tolist() == [0, 0, 0, 0, 3, 0, 0, 0]
    assert second.positions[:5].tolist() == [20, 21, 22, 23, 0]


def test_without_short_ones_there_are_only_long_passes() -> None:
    step = packed([request(name, 12, 11) for name in "abcde"])
    assert [(each.is_long, names(each)) for each in step.executions] == [(True, "ab"), (True, "cd"), (True, "e")]
    assert owned(step) == [[0, 1], [2, 3], [4]]


def test_rows_of_drafts_keep_their_places() -> None:
    shape = BatchShape(num_rows=8, num_groups=2, num_blocks=6, num_drafts=8).divided(8, block_size=4)
    requests = [request(name, length, length - 1) for name, length in zip("abcd", (8, 12, 5, 13))]
    step = packed(requests, shape, drafts={"a": [1], "b": [2, 3], "c": [4, 5]})
    # In the step's order d has one token, so it is first, and then a of 9 tokens, b of 14, c of 7.
    assert step.rows.tolist() == [3, 0, 1, 2]
    assert owned(step) == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
    short, first, second = (view(each, shape) for each in step.executions)
    assert short.logit_rows[6:9].tolist() == [0, 1, 2]
    assert short.token_ids[:3].tolist() == [204, 4, 5]
    assert first.logit_rows[:3].tolist() == [0, 1, 2]
    assert second.logit_rows[3:6].tolist() == [0, 1, 2]
    sample = SampleInputs.unpack(step.sample, lambda bits: bits.view(np.float32))
    assert sample.draft[:9].tolist() == [-1, 1, -1, 2, 3, -1, 4, 5, -1]


def test_prompts_are_scored_in_the_pass_that_computes_them() -> None:
    requests = [request("a", 20, 17, 3), request("b", 6, 0, 0), request("c", 9, 5, 2), request("d", 10, 6)]
    step = packed(requests)
    assert [names(each) for each in step.executions] == ["b", "ac", "d"]
    short, first, second = (each.prompt for each in step.executions)
    assert short is not None
    assert first is not None
    assert second is None
    assert (short.sources.tolist(), short.rows) == ([0, 1, 2, 3, 4], ((1, 1, 5, 0),))
    assert first.sources.tolist() == [0, 1, 3, 4, 5]
    assert first.token_ids.tolist() == [18, 19, 206, 207, 208]
    assert first.rows == ((0, 18, 2, 3), (2, 6, 3, 2))


def test_a_block_that_is_not_needed_yet_has_no_entry() -> None:
    """Left by drafts that were wrong: the row is short again."""
    step = packed([new("a", range(8), computed=7, blocks=([1, 2, 3], [4, 5, 6])), request("b", 4, 3)])
    [only] = step.executions
    assert not only.is_long
    assert view(only).block_tables[:, 0].tolist() == [[1, 2], [4, 5]]


def test_bursts_stay_in_the_short_shape() -> None:
    batch = batch_of(request("a", 6, 0), request("b", 3, 0), shape=TWO)
    batch.apply(schedule(cached("a", 5), cached("b", 2)))
    step = pack(schedule(counts={"a": 3, "b": 4}, num_steps=4), batch, BUCKETS)
    assert [(each.is_long, each.num_tokens) for each in step.executions] == [(False, 4)]
    with pytest.raises(ValueError, match="beyond most_model_len"):
        pack(schedule(counts={"a": 4, "b": 4}, num_steps=4), batch, BUCKETS)


def rows_of(step: StepInputs, shape: BatchShape) -> Iterator[tuple[int, dict[str, object]]]:
    """Of each row of the head pass what its forward pass knows of the request."""
    for each in step.executions:
        inputs = view(each, shape)
        count = int(inputs.distribution[2])
        mine = range(count) if each.owned is None else np.flatnonzero(each.owned)
        decodes = int(inputs.distribution[0])
        for row, place in enumerate(mine):
            tokens = slice(inputs.query_start[row], inputs.query_start[row + 1])
            tables = inputs.block_tables[:, row]
            assert (inputs.token_rows[tokens] == row).all()
            assert (row < decodes) == (tokens.stop - tokens.start == 1)
            assert inputs.logit_rows[place] == tokens.stop - 1
            yield (
                int(place),
                {
                    "tokens": inputs.token_ids[tokens].tolist(),
                    "sources": inputs.token_sources[tokens].tolist(),
                    "positions": inputs.positions[tokens].tolist(),
                    "length": int(inputs.seq_lens[row]),
                    "tables": [line[line > 0].tolist() for line in tables],
                },
            )


@given(
    st.lists(st.integers(1, MAX_MODEL_LEN).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), max_size=8)
)
@settings(max_examples=60)
def test_each_row_is_computed_once_and_as_in_one_shape(lengths: list[tuple[int, int]]) -> None:
    requests = [request(name, *each) for name, each in zip("abcdefgh", lengths or [(1, 0)])]
    one, two = packed(requests, SHAPE), packed(requests)
    expected, found = list(rows_of(one, SHAPE)), list(rows_of(two, TWO))
    assert len(expected) == len(found) == len(requests)
    assert dict(found) == dict(expected)
    assert one.rows.tolist() == two.rows.tolist()
    np.testing.assert_array_equal(one.sample, two.sample)
