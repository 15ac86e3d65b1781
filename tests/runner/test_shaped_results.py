"""Log-probabilities on their way back from the device: to the requests that asked, for as many as they asked for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.ops.sampling import xla
from noria.runner.results import PromptScores, SampledTokens
from noria.scheduler.schedule import NewRequest, Schedule


def new(name: str, token_ids: list[int], **options: Any) -> NewRequest:
    count = len(token_ids)
    return NewRequest(name, token_ids, SamplingParams(**options), frozenset(), 0, count, 0, ([1],))


def dispatched(batch: PersistentBatch, step: StepInputs, tokens: list[int]) -> SampledTokens:
    """What the runner hands on: row i of the step has the likeliest tokens 7 - i, 0, 1, ... in this order."""
    logits = np.tile(-np.arange(8, dtype=np.float32), (4, 1))
    logits[np.arange(4), 7 - np.arange(4)] = 1
    names = tuple(batch.request_ids[row] or "" for row in step.rows)
    sources = np.flatnonzero(step.samples)
    expected = batch.expect(step.rows[sources], sources, step.steps[sources]) if len(sources) else None
    packed, prompt = xla.score(jnp.asarray(logits), jnp.asarray(tokens), jnp.int32(len(tokens)), num_top=3), None
    if step.prompt is not None:
        rows = np.full((4, 8), -1.0, np.float32)
        rows[:, 0] = 0
        parts = [step.prompt.token_ids[i : i + 4] for i in range(0, step.prompt.num_tokens, 4)]
        arrays = [
            xla.score(jnp.asarray(rows), jnp.asarray(np.resize(part, 4)), jnp.int32(4), num_top=3) for part in parts
        ]
        prompt = PromptScores(step.prompt, tuple(arrays))
    array = np.array(tokens, np.int32)
    scores = packed if step.shaping is not None else None
    return SampledTokens(
        batch,
        names,
        sources,
        expected,
        array,
        scores=scores,
        num_logprobs=step.num_logprobs,
        prompt=prompt,  # pyright: ignore[reportArgumentType]
    )


def make_batch(*requests: NewRequest) -> PersistentBatch:
    batch = PersistentBatch(BatchShape(4, 1, 4), 32)
    batch.apply(Schedule(new_requests=requests))
    return batch


def step_of(batch: PersistentBatch, **counts: int) -> StepInputs:
    return pack(Schedule(num_scheduled_tokens=counts), batch, Buckets((32,), (4,)))


def test_each_request_gets_its_own() -> None:
    batch = make_batch(
        new("a", [1, 2, 3], logprobs=2), new("b", [4]), new("c", [5, 6, 7], logprobs=3), new("d", [6], logprobs=0)
    )
    step = step_of(batch, a=3, b=1, c=2, d=1)
    assert step.rows.tolist() == [1, 3, 0, 2]  # c is not complete
    late = dispatched(batch, step, [1, 6, 0, 4])
    batch.apply(Schedule(new_requests=(new("e", [1], logprobs=1),), finished_ids=("a",)))  # takes the row of a
    result = late.result()
    assert result.sampled_token_ids == {"b": [1], "d": [6], "a": [0], "c": []}
    assert result.logprobs.keys() == {"a", "d"}
    assert [(token, rank) for token, _, rank in result.logprobs["d"][0]] == [(6, 1)]
    assert [(token, rank) for token, _, rank in result.logprobs["a"][0]] == [(0, 2), (5, 1), (0, 2)]
    sums = np.log(np.exp(1) + sum(np.exp(-i) for i in range(8) if i != 5))
    assert [value for _, value, _ in result.logprobs["a"][0]] == pytest.approx([0 - sums, 1 - sums, 0 - sums])
    assert result.prompt_logprobs == {}


def test_prompts_come_in_several_arrays() -> None:
    batch = make_batch(
        new("a", [0, 1, 2, 3, 4, 5], prompt_logprobs=1), new("b", [1, 1, 1], prompt_logprobs=0), new("c", [2])
    )
    step = step_of(batch, a=5, b=3)
    result = dispatched(batch, step, [1, 1, 0, 0]).result()
    assert result.sampled_token_ids == {"a": [], "b": [1]}
    assert result.logprobs == {}
    first, found = result.prompt_logprobs["a"]
    assert first == 1
    assert [(own[0], top[0]) for own, top in found] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]
    first, found = result.prompt_logprobs["b"]
    assert first == 1
    assert [[token for token, _, _ in figures] for figures in found] == [[1], [1]]


def test_a_step_that_samples_nothing_still_brings_them() -> None:
    batch = make_batch(new("a", [0, 1, 2, 3], prompt_logprobs=0))
    result = dispatched(batch, step_of(batch, a=2), [0, 0, 0, 0]).result()
    assert result.sampled_token_ids == {"a": []}
    assert [figures[0][0] for figures in result.prompt_logprobs["a"][1]] == [1, 2]
