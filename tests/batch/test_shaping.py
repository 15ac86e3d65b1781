"""What a batch says of rows that are shaped, and of prompts whose log-probabilities are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from batches import cached, new, resumed, schedule

from noria.batch.buckets import Buckets
from noria.batch.edits import BIAS, HEADER, MAX_ENTRIES, NOTHING, OUTPUT, PROMPT
from noria.batch.inputs import BatchShape, ShapingInputs
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.scheduler.schedule import NewRequest

BUCKETS = Buckets(tokens=(16, 32), requests=(4, 8))
PENALIZED = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, logprobs=3)


def batch_of(*requests: NewRequest) -> PersistentBatch:
    batch = PersistentBatch(BatchShape(8, 2, 6), 24)
    batch.apply(schedule(*requests))
    return batch


def step_of(batch: PersistentBatch, **counts: int) -> StepInputs:
    return pack(schedule(counts=counts), batch, BUCKETS)


def shaping_of(step: StepInputs) -> ShapingInputs:
    assert step.shaping is not None
    return ShapingInputs.unpack(step.shaping, lambda bits: bits.view(np.float32))


def entries(edit: np.ndarray) -> list[tuple[int, int, float]]:
    """(kind, token, value) of all entries."""
    tokens, kinds, values = edit[HEADER:].reshape(3, MAX_ENTRIES)
    floats = values.view(np.float32)
    rows = zip(kinds.tolist(), tokens.tolist(), values.tolist(), floats.tolist())
    return [(kind, token, real if kind == BIAS else value) for kind, token, value, real in rows if kind != NOTHING]


def test_plain_steps_have_nothing_more() -> None:
    batch = batch_of(new("a", [1, 2, 3]), new("b", [4]))
    step = step_of(batch, a=3, b=1)
    assert (step.shaping, step.num_logprobs, step.executions[0].prompt) == (None, None, None)
    assert batch.take_edits() == []


def test_shaped_rows_beside_plain_ones() -> None:
    batch = batch_of(new("a", [1, 2]), new("b", [3, 4], params=PENALIZED), new("c", [5]))
    step = step_of(batch, a=2, b=2, c=1)
    shaping = shaping_of(step)
    assert step.rows.tolist() == [2, 0, 1]
    assert shaping.table_row.tolist()[:3] == [2, 0, 1]
    assert shaping.counts.tolist() == shaping.scores.tolist() == [0, 0, 1, 0]
    assert shaping.presence.tolist() == [0, 0, 0.5, 0]
    assert shaping.frequency.tolist() == [0, 0, -0.25, 0]
    assert shaping.repetition.tolist() == [1, 1, 1.5, 1]
    assert not shaping.has_bias.any()
    assert (shaping.bad == -1).all()
    assert step.num_logprobs is not None
    assert step.num_logprobs.tolist() == [-1, -1, 3]


def test_an_unfinished_prompt_counts_nothing() -> None:
    """Its token is dropped: with nobody else who asks, the plain sampler is good enough."""
    batch = batch_of(new("a", [1, 2, 3, 4], params=PENALIZED), new("b", [3, 4], params=PENALIZED))
    assert step_of(batch, a=2).shaping is None
    shaping = shaping_of(step_of(batch, a=2, b=2))
    assert shaping.counts.tolist() == [0, 1, 0, 0]
    assert shaping.repetition.tolist() == [1, 1.5, 1, 1]


def test_rows_write_the_tables_when_they_are_taken() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={7: -1.5}, bad_token_ids=[8])
    batch = batch_of(new("a", [1]), new("b", [3, 3, 4, 9], params=params, num_prompt_tokens=3))
    [edit] = batch.take_edits()
    assert edit[:HEADER].tolist() == [1, 1, 0]
    expected = [(PROMPT, 3, 1), (PROMPT, 4, 1), (OUTPUT, 9, 1), (BIAS, 7, -1.5), (BIAS, 8, -np.inf)]
    assert entries(edit) == expected
    assert batch.take_edits() == []
    assert shaping_of(step_of(batch, b=4)).has_bias.tolist() == [1, 0, 0, 0]


def test_a_request_that_comes_back_writes_them_again() -> None:
    batch = batch_of(new("a", [1, 2], params=PENALIZED))
    batch.take_edits()
    batch.apply(schedule(preempted=["a"]))
    batch.apply(schedule(new("b", [5])))
    batch.apply(schedule(resumed("a", [1, 2, 7, 7])))
    [edit] = batch.take_edits()
    assert edit[0] == batch.row("a") == 1
    assert entries(edit) == [(PROMPT, 1, 1), (PROMPT, 2, 1), (OUTPUT, 7, 2)]


def test_log_probabilities_alone_need_no_tables() -> None:
    batch = batch_of(new("a", [1, 2], params=SamplingParams(logprobs=0)))
    assert batch.take_edits() == []
    step = step_of(batch, a=2)
    assert shaping_of(step).scores.tolist() == [1, 0, 0, 0]
    assert step.num_logprobs is not None
    assert step.num_logprobs.tolist() == [0]


def test_what_is_allowed_is_all_that_is_not_excluded() -> None:
    params = SamplingParams(allowed_token_ids=[3, 5, 6], logit_bias={5: 2.0, 9: 1.0}, bad_token_ids=[6])
    [edit] = batch_of(new("a", [1], params=params)).take_edits()
    assert edit.view(np.float32)[2] == -np.inf
    assert entries(edit) == [(BIAS, 3, 0.0), (BIAS, 5, 2.0), (BIAS, 6, -np.inf)]


def test_bad_sequences_and_the_end_of_the_output() -> None:
    request = new("a", [1, 2, 3, 11, 12], params=SamplingParams(bad_words=["x"]), num_prompt_tokens=3)
    request = NewRequest(**{name: getattr(request, name) for name in request.__slots__} | {"bad_sequences": BAD})
    batch = batch_of(request)
    assert entries(batch.take_edits()[0]) == [(BIAS, 40, -np.inf)]
    step = step_of(batch, a=5)
    shaping = shaping_of(step)
    assert shaping.bad[0, 0].tolist() == [-1] * 6 + [50, 51]
    assert shaping.bad[0, 1].tolist() == [-1] * 5 + [60, 61, 62]
    assert (shaping.bad[0, 2:] == -1).all()
    assert shaping.tail[0].tolist() == [-1] * 5 + [11, 12]  # the prompt is not part of it
    assert shaping.newest[0] == -1
    batch.expect(step.rows, np.array([0]), np.array([1]))
    batch.apply(schedule(cached("a", 5)))
    shaping = shaping_of(step_of(batch, a=1))
    assert shaping.tail[0, :-1].tolist() == [-1] * 4 + [11, 12]
    assert shaping.newest[0] == 0


BAD = ((50, 51), (40,), (60, 61, 62))


def test_a_burst_is_refused() -> None:
    batch = batch_of(new("a", [1], params=PENALIZED), new("b", [1]))
    with pytest.raises(ValueError, match="single steps"):
        pack(schedule(counts={"a": 2, "b": 2}, num_steps=2), batch, BUCKETS)
    assert pack(schedule(counts={"b": 2}, num_steps=2), batch, BUCKETS).is_burst


def test_the_tokens_behind_those_computed_are_scored() -> None:
    asks, more = SamplingParams(prompt_logprobs=0), SamplingParams(prompt_logprobs=7)
    batch = batch_of(new("a", range(10, 15), params=asks), new("b", range(20, 26)), new("c", [30, 31], params=more))
    part = step_of(batch, a=3, b=6, c=2).executions[0].prompt
    assert part is not None
    assert part.rows == ((0, 1, 3, 0), (2, 1, 1, 7))
    assert part.sources.tolist() == [0, 1, 2, 9]
    assert part.token_ids.tolist() == [11, 12, 13, 31]
    batch.apply(schedule(cached("a", 3)))
    part = step_of(batch, a=2, b=1).executions[0].prompt
    assert part is not None
    assert part.rows == ((1, 4, 1, 0),)  # b has one token, so it comes first
    assert part.sources.tolist() == [1]
    assert part.token_ids.tolist() == [14]
    batch.apply(schedule(cached("a", 4)))
    assert step_of(batch, a=1).executions[0].prompt is None
