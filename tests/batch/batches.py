"""Schedules and batches for the tests of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from noria.batch.inputs import BatchShape
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.scheduler.schedule import CachedRequest, NewRequest, Schedule

SHAPE = BatchShape(num_rows=8, num_groups=2, num_blocks=6)
MAX_MODEL_LEN = 24


def new(
    request_id: str,
    token_ids: Sequence[int],
    *,
    params: SamplingParams | None = None,
    stops: Sequence[int] = (),
    key: int = 0,
    num_prompt_tokens: int | None = None,
    computed: int = 0,
    blocks: Sequence[Sequence[int]] = ((), ()),
) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=list(token_ids),
        sampling_params=params or SamplingParams(),
        stop_token_ids=frozenset(stops),
        key=key,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=computed,
        block_ids=tuple(map(list, blocks)),
    )


def cached(request_id: str, computed: int, blocks: Sequence[Sequence[int]] = ((), ())) -> CachedRequest:
    return CachedRequest(request_id, computed, tuple(map(list, blocks)))


def resumed(
    request_id: str, token_ids: Sequence[int], computed: int = 0, blocks: Sequence[Sequence[int]] = ((), ())
) -> CachedRequest:
    return CachedRequest(request_id, computed, tuple(map(list, blocks)), resumed=True, token_ids=list(token_ids))


def schedule(
    *requests: NewRequest | CachedRequest,
    counts: Mapping[str, int] | None = None,
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
    num_steps: int = 1,
) -> Schedule:
    return Schedule(
        new_requests=tuple(request for request in requests if isinstance(request, NewRequest)),
        cached_requests=tuple(request for request in requests if isinstance(request, CachedRequest)),
        num_scheduled_tokens=dict(counts or {}),
        finished_ids=tuple(finished),
        preempted_ids=tuple(preempted),
        num_steps=num_steps,
    )


def sample(batch: PersistentBatch, tokens: Mapping[int, int]) -> None:
    """A step samples a token for each of these rows, and the host learns them."""
    rows = np.array(list(tokens))
    expected = batch.expect(rows, np.arange(len(rows)), np.ones(len(rows), int))
    batch.fulfil(expected, np.array([list(tokens.values())]))


def batch_of(*requests: NewRequest, shape: BatchShape = SHAPE, max_model_len: int = MAX_MODEL_LEN) -> PersistentBatch:
    batch = PersistentBatch(shape, max_model_len)
    batch.apply(schedule(*requests))
    return batch
