"""From a schedule to the padded inputs of a step. Warm-up and serving both come through here, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from noria.batch.buckets import Buckets, pick
from noria.batch.executions import Execution, StepRows, pack_forward
from noria.batch.head_rows import HeadRows, Places
from noria.batch.inputs import BatchShape, ForwardInputs, HeadInputs, SampleInputs, ShapingInputs
from noria.batch.persistent import PersistentBatch
from noria.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, ready for upload, and what the host must know to read its outputs."""

    executions: tuple[Execution, ...]  # forward passes, in their order; one but for steps of short and long rows
    sample: np.ndarray  # int32, see SampleInputs.of_ranks
    num_rows: int  # request bucket, times the number of ranks
    rows: np.ndarray  # [n]: row of the persistent batch behind each row of the step; those of a rank are together
    samples: np.ndarray  # [n] bool: false where the prompt is still unfinished and the sampled token is dropped
    steps: np.ndarray  # [n]: tokens that each row may get: 1 but in a burst, or with drafts
    is_burst: bool  # its token bucket is its request bucket
    shaping: np.ndarray | None = None  # int32, see ShapingInputs.of_ranks; None where no row needs it
    num_logprobs: np.ndarray | None = None  # [n]: how many are asked for; -1 for none. None where shaping is
    # [most, n]: rows of the head pass of each row, -1 where it has fewer. None where they are the same: without drafts,
    # on one rank.
    places: np.ndarray | None = None
    has_drafts: bool = False
    # What a draft head wants: int32, see HeadInputs, or of a burst the rows as of DraftInputs. None without.
    head: np.ndarray | None = None

    @property
    def forward(self) -> np.ndarray:
        """Of the first forward pass."""
        return self.executions[0].forward

    @property
    def num_tokens(self) -> int:
        """The same."""
        return self.executions[0].num_tokens


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of HeadPrograms.draft, all int32, of R rows of each rank."""

    forward: np.ndarray  # see ForwardInputs.of_ranks; a token for each row
    sample: np.ndarray  # see SampleInputs.of_ranks
    state_rows: np.ndarray  # [R] or, of several ranks, [ranks, R]: rows of the rank
    num_rows: int  # request bucket, times the number of ranks
    places: Mapping[str, int]  # by request, which of these rows is its own


def pack(schedule: Schedule, batch: PersistentBatch, buckets: Buckets) -> StepInputs:
    """Lays out one step of a batch to which the schedule has been applied.

    With scheduled tokens [2, 5, 3] the query starts are [0, 2, 7, 10], the offsets [0 1 0 1 2 3 4 0 1 2], and a token's
    position is its request's computed tokens plus its offset. Of a burst these are the inputs of the first pass.

    With scheduled tokens [4, 100, 3, 100, 2], of which the last [3, 0, 2, 0, 1] are drafts, the tokens that are sampled
    behind are [0 1 2 3, 103, 104 105 106, 206, 207 208]: those before a draft show whether it is right.

    Every rank has as many tokens and rows as the one that has the most: those of rank r begin at r times that.
    """
    scheduled = schedule.num_scheduled_tokens
    rows = np.fromiter((batch.row(request_id) for request_id in scheduled), np.int64, len(scheduled))
    counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
    steps, counts = (counts, np.ones_like(counts)) if schedule.is_burst else (np.ones_like(counts), counts)
    # Decode rows first, each with one token (a last chunk of one token is a decode to the attention kernel).
    order = _order(rows, counts > 1, batch.shape)
    rows, counts, steps = rows[order], counts[order], steps[order]
    parts = _parts(rows, batch.shape)
    drafts = schedule.draft_token_ids
    num_drafts = np.array([len(drafts.get(request_id, ())) for request_id in scheduled])[order] if drafts else None
    head = None if num_drafts is None else HeadRows.of(num_drafts)
    head_rows = [part.stop - part.start + (0 if num_drafts is None else int(num_drafts[part].sum())) for part in parts]
    height = pick(buckets.requests if head is None else buckets.with_drafts, max(head_rows))
    sizes = (height,) if schedule.is_burst else buckets.tokens
    executions = pack_forward(batch, StepRows(rows, counts, num_drafts), parts, sizes)
    at = Places.of(head_rows, height)
    ends = batch.num_computed[rows] + counts
    samples = ends >= batch.num_tokens[rows]
    # The sampled token of an unfinished prompt is dropped, so it need not be the right one.
    shaped = bool((batch.is_shaped[rows] & samples).any())
    if schedule.is_burst:
        _check_burst(batch, rows, steps, shaped)
    sampling = rows, ends, samples
    if num_drafts is not None and head is not None:
        sampling = rows[head.rows], ends[head.rows] - head.back, samples[head.rows]
        steps = steps + num_drafts
    return StepInputs(
        executions=executions,
        sample=_pack_sample(batch, *sampling[:2], steps if head is None else None, at, head),
        num_rows=height * len(parts),
        rows=rows,
        samples=samples,
        steps=steps,
        is_burst=schedule.is_burst,
        shaping=_pack_shaping(batch, *sampling, at) if shaped else None,
        num_logprobs=batch.num_logprobs[rows] if shaped else None,
        places=at.of_rows(head),
        has_drafts=head is not None,
        head=_pack_head(batch, executions[0], at, sampling, schedule.is_burst),
    )


def _check_burst(batch: PersistentBatch, rows: np.ndarray, steps: np.ndarray, shaped: bool) -> None:
    """Raises ValueError for what the device's loop does not do: the scheduler must plan single steps for it."""
    if shaped:
        raise ValueError("a burst has rows that are shaped: the scheduler must plan single steps for them")
    most = batch.shape.most_model_len
    if most is not None and (batch.num_computed[rows] + steps > most).any():
        raise ValueError("a burst has rows beyond most_model_len: the scheduler must plan single steps for them")


def _order(rows: np.ndarray, is_prefill: np.ndarray, shape: BatchShape) -> np.ndarray:
    if shape.num_ranks == 1:
        return np.argsort(is_prefill, kind="stable")
    return np.lexsort((is_prefill, rows // shape.num_rows))


def _parts(rows: np.ndarray, shape: BatchShape) -> list[slice]:
    """The rows of each rank, in the order of _order."""
    if shape.num_ranks == 1:
        return [slice(0, len(rows))]
    ends = np.cumsum(np.bincount(rows // shape.num_rows, minlength=shape.num_ranks)).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def pack_drafts(counts: Mapping[str, int], batch: PersistentBatch, sizes: tuple[int, ...]) -> DraftInputs:
    """For a draft head that makes so many drafts of each of these requests, whose tokens are all known.

    sizes: request buckets.
    """
    shape = batch.shape
    names = sorted(counts, key=lambda request_id: batch.row(request_id) // shape.num_rows)  # by rank
    rows = np.fromiter((batch.row(request_id) for request_id in names), np.int64, len(names))
    steps = np.fromiter((counts[request_id] for request_id in names), np.int64, len(names))
    parts = _parts(rows, shape)
    widths = [part.stop - part.start for part in parts]
    at = Places.of(widths, pick(sizes, max(widths)))
    buffers = []
    for part, width in zip(parts, widths):
        buffer, inputs = ForwardInputs.allocate(shape, at.height)
        inputs.query_start[:] = np.minimum(np.arange(shape.num_rows + 1), width)
        inputs.block_tables[:, :width] = batch.block_tables[:, rows[part]]
        inputs.distribution[:] = width
        buffers.append(buffer)
    return DraftInputs(
        forward=buffers[0] if len(buffers) == 1 else np.stack(buffers),
        sample=_pack_sample(batch, rows, batch.num_tokens[rows], steps, at, None),
        state_rows=_own_rows(rows, at, shape),
        num_rows=at.height * at.num_ranks,
        places=dict(zip(names, at.numbers.tolist())),
    )


def _own_rows(rows: np.ndarray, at: Places, shape: BatchShape) -> np.ndarray:
    """Rows of the batch as their ranks count them, with padding behind the last of each."""
    own = np.full(at.height if at.num_ranks == 1 else (at.num_ranks, at.height), shape.num_rows, np.int32)
    own[at.index] = rows % shape.num_rows
    return own


def _pack_head(
    batch: PersistentBatch,
    execution: Execution,
    at: Places,
    sampling: tuple[np.ndarray, np.ndarray, np.ndarray],
    is_burst: bool,
) -> np.ndarray | None:
    """sampling: of the rows of the head pass, row of the batch, position that is sampled, and whether it counts."""
    shape = batch.shape
    rows, ends, samples = sampling
    if not shape.has_head:
        return None
    if is_burst:
        return _own_rows(rows, at, shape)
    num_tokens = execution.num_tokens // at.num_ranks
    step = ForwardInputs.unpack(execution.forward, shape, num_tokens)
    buffer, inputs = HeadInputs.allocate(shape, num_tokens)
    last = step.logit_rows[at.index]
    places = last if at.num_ranks == 1 else (at.index[0], last)
    # Within a row the next token is at hand; behind the last of it is what is sampled, or more of the prompt.
    inputs.next_ids[..., :-1] = step.token_ids[..., 1:]
    inputs.next_ids[places] = batch.token_ids[rows, ends]
    inputs.next_sources[:] = -1
    inputs.next_sources[places] = np.where(samples, at.numbers, -1)
    inputs.state_rows[:] = shape.num_rows
    inputs.state_rows[at.index] = rows % shape.num_rows
    return buffer


def _pack_sample(
    batch: PersistentBatch,
    rows: np.ndarray,
    ends: np.ndarray,
    steps: np.ndarray | None,
    at: Places,
    head: HeadRows | None,
) -> np.ndarray:
    """rows, ends: of the head pass, the row of the batch and the position that is sampled. steps: None for 1 each."""
    buffer, inputs = SampleInputs.allocate(at.height, at.num_ranks)
    for name in ("temperature", "top_p", "min_p", "top_k", "num_stops", "banned_until", "stops"):
        getattr(inputs, name)[at.index] = getattr(batch, name)[rows]
    inputs.key_low[at.index], inputs.key_high[at.index] = batch.key[rows].T
    inputs.position[at.index] = ends
    inputs.num_steps[at.index] = 1 if steps is None else steps
    inputs.draft[:] = -1
    if head is not None:
        inputs.draft[at.index] = np.where(head.back > 0, batch.token_ids[rows, ends], -1)
        inputs.place[at.index] = head.place
    return buffer


def _pack_shaping(
    batch: PersistentBatch, rows: np.ndarray, ends: np.ndarray, samples: np.ndarray, at: Places
) -> np.ndarray:
    """rows, ends: as of _pack_sample."""
    buffer, inputs = ShapingInputs.allocate(at.height, at.num_ranks)
    inputs.repetition[:] = 1
    inputs.newest[:] = -1
    inputs.tail[:] = -1
    inputs.bad[:] = -1
    inputs.table_row[at.index] = rows % batch.shape.num_rows
    shaped = batch.is_shaped[rows] & samples
    inputs.counts[at.index] = shaped & batch.is_penalized[rows]
    inputs.has_bias[at.index] = shaped & batch.has_bias[rows]
    inputs.scores[at.index] = shaped & (batch.num_logprobs[rows] >= 0)
    shaped_rows = rows[shaped]
    places = at.among(shaped)
    for name in ("presence", "frequency", "repetition", "bad"):
        getattr(inputs, name)[places] = getattr(batch, name)[shaped_rows]
    inputs.newest[places] = batch.pending[shaped_rows]
    length = inputs.tail.shape[-1]
    positions = ends[shaped][:, None] + np.arange(-length, 0)
    tokens = batch.token_ids[shaped_rows[:, None], np.maximum(positions, 0)]
    inputs.tail[places] = np.where(positions >= batch.num_prompt[shaped_rows][:, None], tokens, -1)
    return buffer
