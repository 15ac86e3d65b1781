"""From a schedule to the padded inputs of a step. Warm-up and serving both come through here, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.batch.buckets import Buckets, pick
from noria.batch.inputs import BatchShape, ForwardInputs, HeadInputs, SampleInputs, ShapingInputs
from noria.batch.persistent import PersistentBatch
from noria.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of prompts whose log-probabilities a step can compute: those behind tokens that it computes."""

    sources: np.ndarray  # [m]: of each the place, in the step's tokens, of the one before it
    token_ids: np.ndarray  # [m]
    rows: tuple[tuple[int, int, int, int], ...]  # row of the step, place of its first in the prompt, count, top-N

    @property
    def num_tokens(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, ready for upload, and what the host must know to read its outputs."""

    forward: np.ndarray  # int32, see ForwardInputs.of_ranks
    sample: np.ndarray  # int32, see SampleInputs.of_ranks
    num_tokens: int  # token bucket, times the number of ranks
    num_rows: int  # request bucket, times the number of ranks
    rows: np.ndarray  # [n]: row of the persistent batch behind each row of the step; those of a rank are together
    samples: np.ndarray  # [n] bool: false where the prompt is still unfinished and the sampled token is dropped
    steps: np.ndarray  # [n]: tokens that each row may get: 1 but in a burst, or with drafts
    is_burst: bool  # its token bucket is its request bucket
    shaping: np.ndarray | None = None  # int32, see ShapingInputs.of_ranks; None where no row needs it
    num_logprobs: np.ndarray | None = None  # [n]: how many are asked for; -1 for none. None where shaping is
    prompt: PromptPart | None = None
    # [most, n]: rows of the head pass of each row, -1 where it has fewer. None where they are the same: without drafts,
    # on one rank.
    places: np.ndarray | None = None
    has_drafts: bool = False
    # What a draft head wants: int32, see HeadInputs, or of a burst the rows of the batch [num_rows]. None without.
    head: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class _HeadRows:
    """The rows of the head pass: for every row of the step one, and one more for each draft."""

    rows: np.ndarray  # [m]: row of the step
    place: np.ndarray  # [m]: among those of its row
    back: np.ndarray  # [m]: how many of them come after it
    places: np.ndarray  # [most, n], see StepInputs

    @staticmethod
    def of(num_drafts: np.ndarray) -> _HeadRows:
        """num_drafts: [n], of each row of the step."""
        counts = num_drafts + 1
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        place = np.arange(len(rows)) - first[rows]
        each = np.arange(counts.max(initial=1))[:, None]
        return _HeadRows(rows, place, num_drafts[rows] - place, np.where(each < counts, first + each, -1))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of the head pass lie in arrays that have `height` for each rank."""

    index: Any  # of [height] or, of several ranks, [ranks, height]
    flat: np.ndarray | None  # [m]: the same in one row of numbers; None for 0 to m - 1
    num_ranks: int
    height: int

    @staticmethod
    def of(sizes: Sequence[int], height: int) -> _Places:
        """sizes: rows of each rank."""
        if len(sizes) == 1:
            return _Places(slice(sizes[0]), None, 1, height)
        rank = np.repeat(np.arange(len(sizes)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        return _Places((rank, row), rank * height + row, len(sizes), height)

    def among(self, chosen: np.ndarray) -> Any:
        """The index of those [m] that are true."""
        return np.flatnonzero(chosen) if self.flat is None else tuple(part[chosen] for part in self.index)

    def of_rows(self, head: _HeadRows | None) -> np.ndarray | None:
        """See StepInputs.places: by them what the device yields comes back to the order of the rows of the step, in
        which nothing is padding."""
        if self.flat is None:
            return None if head is None else head.places
        return self.flat[None] if head is None else np.where(head.places >= 0, self.flat[head.places], -1)


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of HeadPrograms.draft, all int32, of R rows."""

    forward: np.ndarray  # see ForwardInputs; a token for each row
    sample: np.ndarray  # see SampleInputs
    state_rows: np.ndarray  # [R]: rows of the batch


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
    head = None if num_drafts is None else _HeadRows.of(num_drafts)
    head_rows = [part.stop - part.start + (0 if num_drafts is None else int(num_drafts[part].sum())) for part in parts]
    height = pick(buckets.requests if head is None else buckets.with_drafts, max(head_rows))
    width = height if schedule.is_burst else pick(buckets.tokens, max(int(counts[part].sum()) for part in parts))
    buffers = [
        _pack_forward(batch, width, rows[p], counts[p], None if num_drafts is None else _HeadRows.of(num_drafts[p]))
        for p in parts
    ]
    at = _Places.of(head_rows, height)
    ends = batch.num_computed[rows] + counts
    samples = ends >= batch.num_tokens[rows]
    # The sampled token of an unfinished prompt is dropped, so it need not be the right one.
    shaped = bool((batch.is_shaped[rows] & samples).any())
    if shaped and schedule.is_burst:
        raise ValueError("a burst has rows that are shaped: the scheduler must plan single steps for them")
    sampling = rows, ends, samples
    if num_drafts is not None and head is not None:
        sampling = rows[head.rows], ends[head.rows] - head.back, samples[head.rows]
        steps = steps + num_drafts
    return StepInputs(
        forward=buffers[0] if len(buffers) == 1 else np.stack(buffers),
        sample=_pack_sample(batch, *sampling[:2], steps if head is None else None, at, head),
        num_tokens=width * len(parts),
        num_rows=height * len(parts),
        rows=rows,
        samples=samples,
        steps=steps,
        is_burst=schedule.is_burst,
        shaping=_pack_shaping(batch, *sampling, at) if shaped else None,
        num_logprobs=batch.num_logprobs[rows] if shaped else None,
        prompt=_prompt_part(batch, rows, counts, parts, width)
        if (batch.num_prompt_logprobs[rows] >= 0).any()
        else None,
        places=at.of_rows(head),
        has_drafts=head is not None,
        head=_pack_head(batch, buffers[0], width, height, sampling, schedule.is_burst),
    )


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


def pack_drafts(counts: Mapping[str, int], batch: PersistentBatch, num_rows: int) -> DraftInputs:
    """For a draft head that makes so many drafts of each of these requests, whose tokens are all known, on one rank.

    num_rows: request bucket.
    """
    shape, n = batch.shape, len(counts)
    rows = np.fromiter((batch.row(request_id) for request_id in counts), np.int64, n)
    buffer, inputs = ForwardInputs.allocate(shape, num_rows)
    inputs.query_start[:] = np.minimum(np.arange(shape.num_rows + 1), n)
    inputs.block_tables[:, :n] = batch.block_tables[:, rows]
    inputs.distribution[:] = n
    steps = np.fromiter(counts.values(), np.int64, n)
    sample = _pack_sample(batch, rows, batch.num_tokens[rows], steps, _Places.of([n], num_rows), None)
    return DraftInputs(buffer, sample, _padded_rows(rows, num_rows, shape.num_rows))


def _padded_rows(rows: np.ndarray, count: int, padding: int) -> np.ndarray:
    padded = np.full(count, padding, np.int32)
    padded[: len(rows)] = rows
    return padded


def _pack_head(
    batch: PersistentBatch,
    forward: np.ndarray,
    num_tokens: int,
    num_rows: int,
    sampling: tuple[np.ndarray, np.ndarray, np.ndarray],
    is_burst: bool,
) -> np.ndarray | None:
    """sampling: of the rows of the head pass, row of the batch, position that is sampled, and whether it counts."""
    shape = batch.shape
    rows, ends, samples = sampling
    if not shape.has_head:
        return None
    if is_burst:
        return _padded_rows(rows, num_rows, shape.num_rows)
    step = ForwardInputs.unpack(forward, shape, num_tokens)
    buffer, inputs = HeadInputs.allocate(shape, num_tokens)
    places = step.logit_rows[: len(rows)]
    # Within a row the next token is at hand; behind the last of it is what is sampled, or more of the prompt.
    inputs.next_ids[:-1] = step.token_ids[1:]
    inputs.next_ids[places] = batch.token_ids[rows, ends]
    inputs.next_sources[:] = -1
    inputs.next_sources[places] = np.where(samples, np.arange(len(rows)), -1)
    inputs.state_rows[:] = _padded_rows(rows, shape.num_logit_rows, shape.num_rows)
    return buffer


def _pack_forward(
    batch: PersistentBatch,
    num_tokens: int,
    rows: np.ndarray,
    counts: np.ndarray,
    head: _HeadRows | None,
) -> np.ndarray:
    """Of one rank."""
    n, total = len(rows), int(counts.sum())
    buffer, inputs = ForwardInputs.allocate(batch.shape, num_tokens)
    starts = np.concatenate([[0], np.cumsum(counts)])  # [n + 1]
    token_rows = np.repeat(np.arange(n), counts)  # [total]
    positions = batch.num_computed[rows][token_rows] + np.arange(total) - starts[token_rows]
    inputs.token_ids[:total] = batch.token_ids[rows[token_rows], positions]
    inputs.token_sources[:] = -1
    newest = positions == batch.num_tokens[rows][token_rows] - 1
    inputs.token_sources[:total] = np.where(newest, batch.pending[rows][token_rows], -1)
    inputs.positions[:total] = positions
    inputs.token_rows[:] = batch.shape.num_rows
    inputs.token_rows[:total] = token_rows
    inputs.query_start[:] = total
    inputs.query_start[: n + 1] = starts
    inputs.seq_lens[:n] = batch.num_computed[rows] + counts
    last = starts[1:] - 1 if head is None else starts[1:][head.rows] - 1 - head.back
    inputs.logit_rows[: len(last)] = last
    widest = int(batch.num_blocks[:, rows].max(initial=0))
    inputs.block_tables[:, :n, :widest] = batch.block_tables[:, rows, :widest]
    num_decodes = int(np.count_nonzero(counts == 1))
    inputs.distribution[:] = num_decodes, num_decodes, n
    return buffer


def _pack_sample(
    batch: PersistentBatch,
    rows: np.ndarray,
    ends: np.ndarray,
    steps: np.ndarray | None,
    at: _Places,
    head: _HeadRows | None,
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
    batch: PersistentBatch, rows: np.ndarray, ends: np.ndarray, samples: np.ndarray, at: _Places
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


def _prompt_part(
    batch: PersistentBatch, rows: np.ndarray, counts: np.ndarray, ranks: list[slice], width: int
) -> PromptPart | None:
    """None where all that is computed of the prompts is their last token. ranks, width: the rows of each rank, and its
    tokens with padding."""
    sources, token_ids, parts = [], [], []
    starts = np.concatenate([r * width + np.cumsum(counts[part]) - counts[part] for r, part in enumerate(ranks)])
    for index in np.flatnonzero(batch.num_prompt_logprobs[rows] >= 0):
        row, first = rows[index], int(batch.num_computed[rows[index]]) + 1
        count = min(first + int(counts[index]), int(batch.num_prompt[row])) - first
        if count > 0:
            sources.append(starts[index] + np.arange(count))
            token_ids.append(batch.token_ids[row, first : first + count])
            parts.append((int(index), first, count, int(batch.num_prompt_logprobs[row])))
    return PromptPart(np.concatenate(sources), np.concatenate(token_ids), tuple(parts)) if parts else None
