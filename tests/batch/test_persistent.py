"""The batch that lives across steps."""

from __future__ import annotations

import numpy as np
import pytest
from batches import SHAPE, batch_of, cached, new, resumed, sample, schedule

from noria.batch.inputs import SampleInputs
from noria.config import SamplingParams


def ids(batch) -> list[str | None]:
    return list(batch.request_ids)


def test_new_requests_take_the_lowest_free_rows() -> None:
    batch = batch_of(new("a", [1]), new("b", [2]), new("c", [3]), new("d", [4]))
    assert [batch.row(name) for name in "abcd"] == [0, 1, 2, 3]
    batch.apply(schedule(finished=["c", "a"]))
    assert ids(batch)[:4] == [None, "b", None, "d"]
    batch.apply(schedule(new("e", [5]), new("f", [6]), new("g", [7])))
    assert ids(batch) == ["e", "b", "f", "d", "g", None, None, None]


def test_a_finished_row_can_be_reused_in_the_same_step() -> None:
    batch = batch_of(*(new(str(row), [row]) for row in range(SHAPE.num_rows)))
    batch.apply(schedule(new("late", [9, 9]), finished=["3"]))
    assert batch.row("late") == 3
    assert batch.num_tokens[3] == 2


def test_more_requests_than_rows_is_an_error() -> None:
    batch = batch_of(*(new(str(row), [row]) for row in range(SHAPE.num_rows)))
    with pytest.raises(IndexError):
        batch.apply(schedule(new("late", [9])))


def test_a_request_that_a_step_leaves_out_stays_as_it_is() -> None:
    batch = batch_of(new("a", [1, 2, 3], blocks=([4], [5]), key=77), new("b", [5, 6]), new("c", [7, 8, 9], computed=1))
    before = batch.token_ids[0].copy(), batch.block_tables[:, 0].copy(), batch.key[0].copy()
    batch.apply(schedule(cached("b", 2), counts={"b": 1}))
    batch.apply(schedule(cached("b", 3), counts={"b": 1}, finished=["c"]))
    assert batch.row("a") == 0
    assert batch.num_requests == 2
    for array, old in zip((batch.token_ids[0], batch.block_tables[:, 0], batch.key[0]), before):
        np.testing.assert_array_equal(array, old)
    assert (batch.num_tokens[0], batch.num_computed[0], list(batch.num_blocks[:, 0])) == (3, 0, [1, 1])


def test_new_blocks_are_appended_in_every_group() -> None:
    batch = batch_of(new("x", [0]), new("a", [1, 2, 3], blocks=([11, 12], [21])))
    batch.apply(schedule(cached("a", 2, ([13], [])), counts={"a": 1}))
    batch.apply(schedule(cached("a", 3, ([], [22, 23])), counts={"a": 1}))
    batch.apply(schedule(cached("a", 4), counts={"a": 1}))
    assert batch.block_tables[0, 1].tolist() == [11, 12, 13, 0, 0, 0]
    assert batch.block_tables[1, 1].tolist() == [21, 22, 23, 0, 0, 0]
    assert batch.num_blocks[:, 1].tolist() == [3, 3]
    assert batch.num_computed[1] == 4
    assert not batch.block_tables[:, 0].any()


def test_a_sampled_token_becomes_the_next_input() -> None:
    batch = batch_of(new("a", [1, 2]), new("b", [3]))
    sample(batch, {1: 42})
    assert batch.token_ids[1, :3].tolist() == [3, 42, 0]
    assert batch.num_tokens.tolist()[:2] == [2, 2]


def test_expected_tokens_have_their_place_before_they_are_known() -> None:
    batch = batch_of(new("a", [1, 2]), new("b", [3]), new("c", [4]))
    expected = batch.expect(np.array([2, 0]), np.array([0, 3]), np.array([1, 1]))
    assert batch.num_tokens.tolist()[:3] == [3, 1, 2]
    assert batch.pending.tolist()[:3] == [3, -1, 0]
    batch.fulfil(expected, np.array([[40, 50]]))
    assert (batch.token_ids[2, 1], batch.token_ids[0, 2]) == (40, 50)
    assert not (batch.pending + 1).any()


def test_tokens_of_the_step_in_flight_stay_pending_when_those_of_the_one_before_arrive() -> None:
    batch = batch_of(new("a", [1, 2]), new("b", [3]))
    first = batch.expect(np.array([0, 1]), np.array([0, 1]), np.array([1, 1]))
    second = batch.expect(np.array([1]), np.array([0]), np.array([1]))  # the budget ran out before "a"
    batch.fulfil(first, np.array([[40, 50]]))
    assert batch.pending.tolist()[:2] == [-1, 0]
    assert batch.token_ids[:2, :3].tolist() == [[1, 2, 40], [3, 50, 0]]
    batch.fulfil(second, np.array([[60]]))
    assert batch.token_ids[1, :3].tolist() == [3, 50, 60]
    assert batch.num_tokens.tolist()[:2] == [3, 3]
    assert batch.pending.tolist()[:2] == [-1, -1]


@pytest.mark.parametrize("same_id", [False, True])
def test_a_row_given_away_expects_nothing(same_id: bool) -> None:
    batch = batch_of(new("a", [1, 2]), new("b", [3]))
    expected = batch.expect(np.array([0, 1]), np.array([0, 1]), np.array([1, 1]))
    batch.apply(schedule(new("a" if same_id else "c", [7, 8, 9, 10]), finished=["a"]))
    assert batch.pending.tolist()[:2] == [-1, 1]
    batch.fulfil(expected, np.array([[40, 50]]))
    assert batch.token_ids[:2, :4].tolist() == [[7, 8, 9, 10], [3, 50, 0, 0]]
    assert batch.num_tokens.tolist()[:2] == [4, 2]


def test_a_preempted_request_gives_its_row_away_and_comes_back_with_all_it_brought() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.7, min_p=0.1, min_tokens=4, max_tokens=9)
    victim = new("a", [1, 2, 3], params=params, stops=[8, 6], key=2**63 + 5, blocks=([11, 12], [21, 22]))
    batch = batch_of(victim, new("b", [4]))
    sample(batch, {0: 30})
    batch.apply(schedule(cached("b", 1), counts={"b": 1}, preempted=["a"]))
    assert ids(batch)[:2] == [None, "b"]
    assert batch.num_requests == 2
    batch.apply(schedule(new("c", [5]), counts={"c": 1}))
    assert batch.row("c") == 0
    batch.apply(schedule(resumed("a", [1, 2, 3, 30], computed=2, blocks=([7], [8])), counts={"a": 2}))
    row = batch.row("a")
    assert row == 2
    assert batch.token_ids[row, :5].tolist() == [1, 2, 3, 30, 0]
    assert (batch.num_tokens[row], batch.num_computed[row]) == (4, 2)
    assert batch.num_blocks[:, row].tolist() == [1, 1]  # the table is replaced
    assert batch.block_tables[:, row, 0].tolist() == [7, 8]
    assert batch.key[row].view(np.uint64).tolist() == [2**63 + 5]
    assert batch.temperature[row] == np.float32(0.5)
    assert batch.top_p[row] == np.float32(0.7)
    assert batch.min_p[row] == np.float32(0.1)
    assert batch.top_k[row] == 3
    assert batch.num_stops[row] == 2
    assert batch.stops[row, :2].tolist() == [6, 8]
    assert batch.banned_until[row] == 3 + 4  # of its prompt, not of what it had at the resume


def test_preempted_and_resumed_in_its_old_row() -> None:
    batch = batch_of(new("a", [1, 2], blocks=([11, 12], [21, 22])))
    batch.apply(schedule(preempted=["a"]))
    batch.apply(schedule(resumed("a", [1, 2, 3], blocks=([13], [23])), counts={"a": 3}))
    assert batch.row("a") == 0
    assert batch.num_blocks[:, 0].tolist() == [1, 1]
    assert batch.generation[0] == 2


def test_a_preempted_request_can_finish() -> None:
    batch = batch_of(new("a", [1]), new("b", [2]))
    batch.apply(schedule(preempted=["a"]))
    batch.apply(schedule(finished=["a"]))
    assert batch.num_requests == 1
    with pytest.raises(KeyError):
        batch.apply(schedule(resumed("a", [1])))


def test_an_id_that_is_finished_and_new_is_two_requests() -> None:
    old = new("a", [1, 2, 3], params=SamplingParams(temperature=0.5, top_k=7), key=1, blocks=([11], [21]))
    batch = batch_of(new("x", [0]), old)
    batch.apply(schedule(new("a", [9], params=SamplingParams(temperature=0.0), key=2), finished=["a", "x"]))
    row = batch.row("a")
    assert row == 0
    assert ids(batch)[:2] == ["a", None]
    assert batch.num_requests == 1
    assert batch.num_tokens[row] == 1
    assert batch.token_ids[row, 0] == 9
    assert (batch.temperature[row], batch.top_k[row]) == (0, 0)
    assert batch.key[row].view(np.uint64).tolist() == [2]
    assert batch.num_blocks[:, row].tolist() == [0, 0]


def test_the_generation_of_a_row_counts_its_requests() -> None:
    batch = batch_of(new("a", [1]), new("b", [2]))
    assert batch.generation[:3].tolist() == [1, 1, 0]
    batch.apply(schedule(new("a", [1]), finished=["a"]))
    assert batch.generation[:3].tolist() == [2, 1, 0]
    batch.apply(schedule(cached("a", 1), counts={"a": 1}))
    assert batch.generation[:3].tolist() == [2, 1, 0]


def test_the_device_is_told_the_stop_tokens_and_how_long_they_are_banned() -> None:
    batch = batch_of(
        new("many", [1, 2], stops=range(40, 0, -1)),  # more than fit: the host finds the others
        new("held", [1, 2], params=SamplingParams(min_tokens=3), stops=[5, 4, 3]),
        new("free", [1, 2]),
    )
    assert batch.num_stops[:3].tolist() == [SampleInputs.MAX_STOPS, 3, 0]
    assert batch.stops[0].tolist() == list(range(1, 1 + SampleInputs.MAX_STOPS))
    assert batch.stops[1, :3].tolist() == [3, 4, 5]
    assert batch.banned_until[:3].tolist() == [2, 5, 2]


@pytest.mark.parametrize(("top_k", "stored"), [(-1, 0), (0, 0), (5, 5), (2**40, 2**31 - 1)])
def test_top_k_fits_32_bits(top_k: int, stored: int) -> None:
    assert batch_of(new("a", [1], params=SamplingParams(top_k=top_k))).top_k[0] == stored
