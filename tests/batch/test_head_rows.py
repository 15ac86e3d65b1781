"""What a draft head is told of a step."""

from __future__ import annotations

import dataclasses

import numpy as np
from batches import new

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape, ForwardInputs, HeadInputs, SampleInputs
from noria.batch.pack import pack, pack_drafts
from noria.batch.persistent import PersistentBatch
from noria.scheduler.schedule import Schedule

SHAPE = BatchShape(num_rows=8, num_groups=1, num_blocks=8, num_drafts=8, has_head=True)
BUCKETS = Buckets(tokens=(16, 256), requests=(4, 8), with_drafts=(4, 8, 16))


def test_the_tokens_that_follow() -> None:
    """a verifies two drafts, b computes a chunk of its prompt, and c the end of one."""
    batch = PersistentBatch(SHAPE, 64)
    requests = (
        new("a", [10, 11, 12], computed=2, blocks=([1],)),
        new("b", range(20, 30), blocks=([2, 3],)),
        new("c", range(30, 34), blocks=([4],)),
    )
    plan = Schedule(
        new_requests=requests, num_scheduled_tokens={"a": 3, "b": 4, "c": 4}, draft_token_ids={"a": [40, 41]}
    )
    batch.apply(plan)
    step = pack(plan, batch, BUCKETS)
    assert step.head is not None
    head = HeadInputs.unpack(step.head, SHAPE, step.num_tokens)
    forward = ForwardInputs.unpack(step.forward, SHAPE, step.num_tokens)
    assert forward.token_ids[:11].tolist() == [12, 40, 41, 20, 21, 22, 23, 30, 31, 32, 33]
    # Rows of the head pass: three of a, one of b, whose token is known, and one of c.
    assert head.next_sources[:11].tolist() == [0, 1, 2, -1, -1, -1, -1, -1, -1, -1, 4]
    assert head.next_ids[3:10].tolist() == [21, 22, 23, 24, 31, 32, 33]
    assert head.state_rows[:6].tolist() == [0, 0, 0, 1, 2, 8]
    assert head.state_rows.shape == (SHAPE.num_logit_rows,)


def test_a_burst_has_its_rows() -> None:
    batch = PersistentBatch(SHAPE, 64)
    requests = tuple(new(name, [1, 2], computed=1, blocks=([1 + i],)) for i, name in enumerate("abc"))
    batch.apply(Schedule(new_requests=requests))
    step = pack(Schedule(num_scheduled_tokens={"c": 2, "a": 3}, num_steps=3), batch, BUCKETS)
    assert step.head is not None
    assert step.head.tolist() == [2, 0, 8, 8]


def test_drafts_begin_behind_the_newest_token() -> None:
    batch = PersistentBatch(SHAPE, 64)
    requests = (new("a", [1, 2, 3], computed=2, blocks=([5],)), new("b", [4, 5], computed=1, blocks=([6],)))
    batch.apply(Schedule(new_requests=requests))
    batch.extend("b", ([7],))
    inputs = pack_drafts({"b": 4, "a": 2}, batch, (4, 8))
    assert (inputs.num_rows, inputs.places) == (4, {"b": 0, "a": 1})
    assert inputs.state_rows.tolist() == [1, 0, 8, 8]
    sample = SampleInputs.unpack(inputs.sample, lambda bits: bits.view(np.float32))
    assert sample.position.tolist() == [2, 3, 0, 0]
    assert sample.num_steps.tolist() == [4, 2, 0, 0]
    forward = ForwardInputs.unpack(inputs.forward, SHAPE, 4)
    assert forward.query_start.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert forward.block_tables[0, :3, :2].tolist() == [[6, 7], [5, 0], [0, 0]]
    assert forward.distribution.tolist() == [2, 2, 2]


def test_without_a_head_there_is_nothing() -> None:
    batch = PersistentBatch(BatchShape(8, 1, 8), 64)
    plan = Schedule(new_requests=(new("a", [1, 2], blocks=([1],)),), num_scheduled_tokens={"a": 2})
    batch.apply(plan)
    assert pack(plan, batch, BUCKETS).head is None


RANKS = BatchShape(num_rows=4, num_groups=1, num_blocks=8, num_drafts=4, has_head=True, num_ranks=2)


def on_ranks() -> PersistentBatch:
    """a and c on rank 1, b on rank 0."""
    batch = PersistentBatch(RANKS, 64)
    of_rank = lambda request, rank: dataclasses.replace(request, rank=rank)
    requests = (
        of_rank(new("a", [10, 11, 12], computed=2, blocks=([1],)), 1),
        of_rank(new("b", range(20, 24), blocks=([2],)), 0),
        of_rank(new("c", range(30, 38), blocks=([3],)), 1),
    )
    batch.apply(Schedule(new_requests=requests))
    return batch


def test_every_rank_is_told_of_its_own_tokens() -> None:
    """a verifies two drafts, c computes a chunk of its prompt, and b the whole of one."""
    batch = on_ranks()
    plan = Schedule(num_scheduled_tokens={"a": 3, "b": 4, "c": 5}, draft_token_ids={"a": [40, 41]})
    batch.apply(plan)
    step = pack(plan, batch, BUCKETS)
    assert step.head is not None
    head = HeadInputs.unpack(step.head, RANKS, step.num_tokens // 2)
    assert step.num_rows == 2 * 4
    # Of all that is sampled, those of rank 1 begin at 4.
    assert head.next_sources[0, :5].tolist() == [-1, -1, -1, 0, -1]
    assert head.next_sources[1, :9].tolist() == [4, 5, 6, -1, -1, -1, -1, -1, -1]
    assert head.next_ids[0, :3].tolist() == [21, 22, 23]
    assert head.next_ids[1, 3:8].tolist() == [31, 32, 33, 34, 35]
    assert head.state_rows.tolist() == [[0, 4, 4, 4, 4, 4, 4, 4], [0, 0, 0, 1, 4, 4, 4, 4]]
    burst = Schedule(num_scheduled_tokens={"a": 3, "c": 2}, num_steps=3)
    told = pack(burst, batch, BUCKETS)
    assert told.head is not None
    assert told.head.tolist() == [[4, 4, 4, 4], [0, 1, 4, 4]]


def test_every_rank_drafts_for_its_own_requests() -> None:
    inputs = pack_drafts({"c": 1, "b": 2, "a": 3}, on_ranks(), (2, 4))
    assert (inputs.num_rows, inputs.places) == (4, {"b": 0, "c": 2, "a": 3})
    assert inputs.state_rows.tolist() == [[0, 4], [1, 0]]
    sample = SampleInputs.unpack(inputs.sample, lambda bits: bits.view(np.float32))
    assert sample.position.tolist() == [[4, 0], [8, 3]]
    assert sample.num_steps.tolist() == [[2, 0], [1, 3]]
    forward = ForwardInputs.unpack(inputs.forward, RANKS, 2)
    assert forward.query_start.tolist() == [[0, 1, 1, 1, 1], [0, 1, 2, 2, 2]]
    assert forward.block_tables[:, 0, :2, 0].tolist() == [[2, 0], [3, 1]]
