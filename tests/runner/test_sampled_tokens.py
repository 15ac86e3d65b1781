"""The tokens of a step on their way back from the device."""

from __future__ import annotations

import numpy as np

from noria.batch.buckets import Buckets
from noria.batch.inputs import NOT_SAMPLED, BatchShape
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.runner.runner import SampledTokens
from noria.scheduler.schedule import CachedRequest, NewRequest, Schedule


def new(request_id: str, token_ids: list[int]) -> NewRequest:
    count = len(token_ids)
    return NewRequest(request_id, token_ids, SamplingParams(), frozenset(), 0, count, 0, ([1],))


def step_of(batch: PersistentBatch, num_steps: int = 1, **counts: int) -> StepInputs:
    return pack(Schedule(num_scheduled_tokens=counts, num_steps=num_steps), batch, Buckets((16,), (4,)))


def sampled(batch: PersistentBatch, step: StepInputs, tokens: list) -> SampledTokens:
    """tokens: of all rows of the step; of a burst a list of such lists."""
    names = tuple(batch.request_ids[row] or "" for row in step.rows)
    sources = np.flatnonzero(step.samples)
    expected = batch.expect(step.rows[sources], sources, step.steps[sources])
    return SampledTokens(batch, names, sources, expected, np.array(tokens, np.int32))


def make_batch() -> PersistentBatch:
    batch = PersistentBatch(BatchShape(4, 1, 4), 32)
    batch.apply(Schedule(new_requests=(new("a", [1, 2, 3]), new("b", [4]), new("c", [5, 6]))))
    return batch


def test_tokens_find_their_requests_whatever_the_order_of_the_rows() -> None:
    batch = make_batch()
    step = step_of(batch, a=3, b=1, c=2)  # in the step b comes first: it has one token
    assert step.rows.tolist() == [1, 0, 2]
    result = sampled(batch, step, [10, 11, 12, 99]).result()
    assert result.sampled_token_ids == {"b": [10], "a": [11], "c": [12]}
    assert batch.num_tokens[:3].tolist() == [4, 2, 3]
    assert batch.token_ids[:3, :4].tolist() == [[1, 2, 3, 11], [4, 10, 0, 0], [5, 6, 12, 0]]


def test_the_token_of_an_unfinished_prompt_is_dropped() -> None:
    batch = make_batch()
    result = sampled(batch, step_of(batch, a=2, c=2), [10, 11, 0, 0]).result()
    assert result.sampled_token_ids == {"a": [], "c": [11]}
    assert batch.num_tokens[:3].tolist() == [3, 1, 3]


def test_a_step_without_any_sample_has_nothing_to_wait_for() -> None:
    batch = make_batch()
    tokens = SampledTokens(batch, ("a",), np.array([], np.int64), None, None)
    assert tokens.result().sampled_token_ids == {"a": []}


def test_a_late_token_does_not_reach_the_next_request_of_its_row() -> None:
    batch = make_batch()
    late = sampled(batch, step_of(batch, a=3, b=1), [10, 11, 0, 0])
    batch.apply(Schedule(new_requests=(new("d", [7, 8]),), finished_ids=("a",)))
    assert batch.row("d") == 0
    assert late.result().sampled_token_ids == {"b": [10], "a": [11]}
    assert batch.num_tokens[:2].tolist() == [2, 2]
    assert batch.token_ids[0, :3].tolist() == [7, 8, 3]  # what is behind the known tokens is never read


def test_nor_a_request_of_the_same_id_in_the_same_row() -> None:
    batch = make_batch()
    late = sampled(batch, step_of(batch, a=3), [10, 0, 0, 0])
    batch.apply(Schedule(new_requests=(new("a", [7, 8]),), finished_ids=("a",)))
    late.result()
    assert batch.num_tokens[0] == 2


def test_nor_a_request_that_was_preempted_and_came_back() -> None:
    """It brings its tokens along, so a late one would be counted twice."""
    batch = make_batch()
    late = sampled(batch, step_of(batch, a=3), [10, 0, 0, 0])
    resumed = CachedRequest("a", 0, ([2],), resumed=True, token_ids=[1, 2, 3])
    batch.apply(Schedule(preempted_ids=("a",)))
    batch.apply(Schedule(cached_requests=(resumed,)))
    assert batch.row("a") == 0
    late.result()
    assert batch.num_tokens[0] == 3


def test_the_tokens_of_a_burst() -> None:
    batch = make_batch()
    batch.apply(Schedule(cached_requests=(CachedRequest("a", 2, ([],)), CachedRequest("c", 1, ([],)))))
    step = step_of(batch, 3, a=3, b=2, c=3)
    none = NOT_SAMPLED
    result = sampled(batch, step, [[10, 20, 30, none], [11, 21, none, none], [12, none, none, none]]).result()
    assert result.sampled_token_ids == {"a": [10, 11, 12], "b": [20, 21], "c": [30]}  # the first one ended "c"
    assert batch.num_tokens[:3].tolist() == [6, 3, 3]
    assert batch.token_ids[0, :6].tolist() == [1, 2, 3, 10, 11, 12]
    assert batch.token_ids[1, :4].tolist() == [4, 20, 21, 0]
    assert batch.token_ids[2, :3].tolist() == [5, 6, 30]


def test_a_late_burst_does_not_reach_the_next_request_of_its_row() -> None:
    batch = make_batch()
    batch.apply(Schedule(cached_requests=(CachedRequest("a", 2, ([],)),)))
    late = sampled(batch, step_of(batch, 2, a=2, b=2), [[10, 20, 0, 0], [11, 21, 0, 0]])
    batch.apply(Schedule(new_requests=(new("d", [7, 8]),), finished_ids=("a",)))
    assert late.result().sampled_token_ids == {"a": [10, 11], "b": [20, 21]}
    assert batch.token_ids[0, :5].tolist() == [7, 8, 3, 0, 0]
    assert batch.token_ids[1, :3].tolist() == [4, 20, 21]


def test_drafts_bring_the_tokens_that_count() -> None:
    batch = PersistentBatch(BatchShape(4, 1, 4, num_drafts=4), 32)
    batch.apply(Schedule(new_requests=(new("a", [1, 2, 3]), new("b", [4]), new("c", [5, 6]))))
    resumed = tuple(CachedRequest(name, count, ([],)) for name, count in (("a", 2), ("c", 1)))
    plan = Schedule(
        cached_requests=resumed,
        num_scheduled_tokens={"a": 4, "b": 1, "c": 2},
        draft_token_ids={"a": [10, 11, 12], "c": [7]},
    )
    batch.apply(plan)
    step = pack(plan, batch, Buckets((16,), (4,), (4, 8)))
    assert step.rows.tolist() == [1, 0, 2]
    assert step.places is not None
    expected = batch.expect(step.rows, np.arange(3), step.steps)
    assert batch.num_tokens[:3].tolist() == [7, 2, 4]
    none = NOT_SAMPLED
    tokens = np.array([20, 10, 11, 9, none, 7, 30, 99], np.int32)
    late = SampledTokens(batch, ("b", "a", "c"), np.arange(3), expected, tokens, places=step.places)  # pyright: ignore[reportArgumentType]
    assert late.result().sampled_token_ids == {"b": [20], "a": [10, 11, 9], "c": [7, 30]}
    assert batch.num_tokens[:3].tolist() == [6, 2, 4]
    assert batch.token_ids[0, :6].tolist() == [1, 2, 3, 10, 11, 9]
    assert batch.token_ids[2, :4].tolist() == [5, 6, 7, 30]
