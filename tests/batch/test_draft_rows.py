"""The rows of a head pass that verifies drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from batches import cached, new, schedule

from noria.batch.buckets import Buckets
from noria.batch.inputs import NOT_SAMPLED, BatchShape, ForwardInputs, SampleInputs, ShapingInputs
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.scheduler.schedule import NewRequest, Schedule

SHAPE = BatchShape(num_rows=8, num_groups=1, num_blocks=8, num_drafts=8)
BUCKETS = Buckets(tokens=(16, 256), requests=(4, 8), with_drafts=(4, 8, 16))
PENALIZED = SamplingParams(presence_penalty=1.0, logprobs=2, seed=1)


def step_of(requests: Sequence[NewRequest], **drafts: list[int]) -> tuple[PersistentBatch, StepInputs]:
    """Everything that is not computed is scheduled, and the drafts."""
    batch = PersistentBatch(SHAPE, 256)
    counts = {
        r.request_id: len(r.token_ids) - r.num_computed_tokens + len(drafts.get(r.request_id, ())) for r in requests
    }
    plan = Schedule(new_requests=tuple(requests), num_scheduled_tokens=counts, draft_token_ids=drafts)
    batch.apply(plan)
    return batch, pack(plan, batch, BUCKETS)


def views(step: StepInputs) -> tuple[ForwardInputs, SampleInputs]:
    forward = ForwardInputs.unpack(step.forward, SHAPE, step.num_tokens)
    return forward, SampleInputs.unpack(step.sample, lambda bits: bits.view(np.float32))


def test_the_example() -> None:
    """Scheduled tokens with the running sum [4, 104, 107, 207, 209], the last [3, 0, 2, 0, 1] of them drafts."""
    requests = [new(name, range(count), blocks=((),)) for name, count in zip("abcde", (1, 100, 1, 100, 1))]
    _, step = step_of(requests, a=[50, 51, 52], c=[60, 61], e=[70])
    forward, sample = views(step)
    assert (step.num_tokens, step.num_rows) == (256, 16)
    assert forward.query_start[:6].tolist() == [0, 4, 104, 107, 207, 209]
    assert forward.logit_rows[:11].tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    draft_rows, bonus_rows = np.flatnonzero(sample.draft >= 0), np.flatnonzero(sample.draft[:11] < 0)
    assert draft_rows.tolist() == [0, 1, 2, 5, 6, 9]
    assert bonus_rows.tolist() == [3, 4, 7, 8, 10]
    assert sample.draft[draft_rows].tolist() == [50, 51, 52, 60, 61, 70]
    assert sample.draft[draft_rows].tolist() == forward.token_ids[forward.logit_rows[draft_rows + 1]].tolist()
    assert sample.place.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 0, 0]
    assert sample.position[:11].tolist() == [1, 2, 3, 4, 100, 1, 2, 3, 100, 1, 2]
    assert sample.num_steps.tolist() == [1] * 11 + [0] * 5
    assert step.steps.tolist() == [4, 1, 3, 1, 2]
    assert step.places is not None
    assert step.places.T.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, 7, -1], [8, -1, -1, -1], [9, 10, -1, -1]]


def test_a_full_bucket_has_no_padding() -> None:
    requests = [new("a", [1, 2], computed=1, blocks=([1],)), new("b", [3], blocks=([2],))]
    _, step = step_of(requests, a=[7, 8, 9, 10], b=[5])
    _, sample = views(step)
    assert step.num_rows == 8  # 5 + 2 do not fit 4
    _, step = step_of(requests, a=[7, 8, 9])
    _, sample = views(step)
    # A row with one token comes first.
    assert sample.num_steps.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert sample.draft.tolist() == [-1, 7, 8, 9, -1, -1, -1, -1]
    _, step = step_of(requests[:1], a=[7, 8, 9])
    _, sample = views(step)
    assert step.num_rows == 4
    assert sample.draft.tolist() == [7, 8, 9, -1]
    assert sample.num_steps.tolist() == [1, 1, 1, 1]


def test_each_row_has_the_parameters_of_its_request() -> None:
    requests = [
        new("a", [1, 2, 3], computed=2, params=PENALIZED, num_prompt_tokens=1, key=7, blocks=([1],)),
        new("b", [3, 3], computed=1, params=SamplingParams(temperature=0), blocks=([2],)),
    ]
    _, step = step_of(requests, a=[7, 8])
    _, sample = views(step)
    assert step.rows.tolist() == [1, 0]
    assert sample.temperature.tolist() == [0, 1, 1, 1]
    assert sample.key_low.tolist() == [0, 7, 7, 7]
    assert step.shaping is not None
    shaping = ShapingInputs.unpack(step.shaping, lambda bits: bits.view(np.float32))
    assert shaping.table_row.tolist() == [1, 0, 0, 0]
    assert shaping.presence.tolist() == [0, 1, 1, 1]
    assert shaping.counts.tolist() == [0, 1, 1, 1]
    assert shaping.tail[:, -4:].tolist() == [[-1] * 4, [-1, -1, 2, 3], [-1, 2, 3, 7], [2, 3, 7, 8]]
    assert step.num_logprobs is not None
    assert step.num_logprobs.tolist() == [-1, 2]


def test_the_batch_keeps_what_was_right() -> None:
    requests = [new("a", [1, 2], computed=1, blocks=([1],)), new("b", [3, 4], computed=1, blocks=([2],))]
    batch, step = step_of(requests, a=[7, 8, 9])
    expected = batch.expect(step.rows, np.arange(2), step.steps)
    assert batch.num_tokens[:2].tolist() == [6, 3]
    none = NOT_SAMPLED
    batch.fulfil(expected, np.array([[20, 7], [none, 5], [none, none], [none, none]]))
    assert batch.num_tokens[:2].tolist() == [4, 3]
    assert batch.token_ids[:2, :4].tolist() == [[1, 2, 7, 5], [3, 4, 20, 0]]
    plan = schedule(cached("a", 3, ([],)), cached("b", 2, ([],)), counts={"a": 1, "b": 1})
    batch.apply(plan)
    step = pack(plan, batch, BUCKETS)
    forward, sample = views(step)
    assert forward.token_ids[:2].tolist() == [5, 20]
    assert forward.token_sources[:2].tolist() == [-1, -1]
    assert sample.position[:2].tolist() == [4, 3]
    assert step.places is None
