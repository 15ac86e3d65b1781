"""From a schedule to the padded inputs of a step. Warm-up and serving both come through here, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from noria.batch.buckets import Buckets, pick
from noria.batch.inputs import ForwardInputs, HeadInputs, SampleInputs, ShapingInputs
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

    forward: np.ndarray  # int32, see ForwardInputs
    sample: np.ndarray  # int32, see SampleInputs
    num_tokens: int  # token bucket
    num_rows: int  # request bucket
    rows: np.ndarray  # [n]: row of the persistent batch behind each row of the step
    samples: np.ndarray  # [n] bool: false where the prompt is still unfinished and the sampled token is dropped
    steps: np.ndarray  # [n]: tokens that each row may get: 1 but in a burst, or with drafts
    is_burst: bool  # its token bucket is its request bucket
    shaping: np.ndarray | None = None  # int32, see ShapingInputs; None where no row needs it
    num_logprobs: np.ndarray | None = None  # [n]: how many are asked for; -1 for none. None where shaping is
    prompt: PromptPart | None = None
    # [most, n]: rows of the head pass of each row, -1 where it has fewer. None without drafts, when they are the same.
    places: np.ndarray | None = None
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
    """
    scheduled = schedule.num_scheduled_tokens
    rows = np.fromiter((batch.row(request_id) for request_id in scheduled), np.int64, len(scheduled))
    counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
    steps, counts = (counts, np.ones_like(counts)) if schedule.is_burst else (np.ones_like(counts), counts)
    # Decode rows first, each with one token (a last chunk of one token is a decode to the attention kernel).
    order = np.argsort(counts > 1, kind="stable")
    rows, counts, steps = rows[order], counts[order], steps[order]
    drafts = schedule.draft_token_ids
    num_drafts = np.array([len(drafts.get(request_id, ())) for request_id in scheduled])[order] if drafts else None
    head = None if num_drafts is None else _HeadRows.of(num_drafts)
    num_decodes = int(np.count_nonzero(counts == 1))
    num_rows = pick(buckets.requests, len(rows)) if head is None else pick(buckets.with_drafts, len(head.rows))
    num_tokens = num_rows if schedule.is_burst else pick(buckets.tokens, int(counts.sum()))
    forward = _pack_forward(batch, num_tokens, rows, counts, num_decodes, head)
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
        forward=forward,
        sample=_pack_sample(batch, *sampling[:2], steps if head is None else None, num_rows, head),
        num_tokens=num_tokens,
        num_rows=num_rows,
        rows=rows,
        samples=samples,
        steps=steps,
        is_burst=schedule.is_burst,
        shaping=_pack_shaping(batch, *sampling, num_rows) if shaped else None,
        num_logprobs=batch.num_logprobs[rows] if shaped else None,
        prompt=_prompt_part(batch, rows, counts) if (batch.num_prompt_logprobs[rows] >= 0).any() else None,
        places=None if head is None else head.places,
        head=_pack_head(batch, forward, num_tokens, num_rows, sampling, schedule.is_burst),
    )


def pack_drafts(counts: Mapping[str, int], batch: PersistentBatch, num_rows: int) -> DraftInputs:
    """For a draft head that makes so many drafts of each of these requests, whose tokens are all known.

    num_rows: request bucket.
    """
    shape, n = batch.shape, len(counts)
    rows = np.fromiter((batch.row(request_id) for request_id in counts), np.int64, n)
    buffer, inputs = ForwardInputs.allocate(shape, num_rows)
    inputs.query_start[:] = np.minimum(np.arange(shape.num_rows + 1), n)
    inputs.block_tables[:, :n] = batch.block_tables[:, rows]
    inputs.distribution[:] = n
    steps = np.fromiter(counts.values(), np.int64, n)
    sample = _pack_sample(batch, rows, batch.num_tokens[rows], steps, num_rows, None)
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
    num_decodes: int,
    head: _HeadRows | None,
) -> np.ndarray:
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
    inputs.distribution[:] = num_decodes, num_decodes, n
    return buffer


def _pack_sample(
    batch: PersistentBatch,
    rows: np.ndarray,
    ends: np.ndarray,
    steps: np.ndarray | None,
    num_rows: int,
    head: _HeadRows | None,
) -> np.ndarray:
    """rows, ends: of the head pass, the row of the batch and the position that is sampled. steps: None for 1 each."""
    n = len(rows)
    buffer, inputs = SampleInputs.allocate(num_rows)
    for name in ("temperature", "top_p", "min_p", "top_k", "num_stops", "banned_until", "stops"):
        getattr(inputs, name)[:n] = getattr(batch, name)[rows]
    inputs.key_low[:n], inputs.key_high[:n] = batch.key[rows].T
    inputs.position[:n] = ends
    inputs.num_steps[:n] = 1 if steps is None else steps
    inputs.draft[:] = -1
    if head is not None:
        inputs.draft[:n] = np.where(head.back > 0, batch.token_ids[rows, ends], -1)
        inputs.place[:n] = head.place
    return buffer


def _pack_shaping(
    batch: PersistentBatch, rows: np.ndarray, ends: np.ndarray, samples: np.ndarray, num_rows: int
) -> np.ndarray:
    """rows, ends: as of _pack_sample."""
    n = len(rows)
    buffer, inputs = ShapingInputs.allocate(num_rows)
    inputs.repetition[:] = 1
    inputs.newest[:] = -1
    inputs.tail[:] = -1
    inputs.bad[:] = -1
    inputs.table_row[:n] = rows
    shaped = batch.is_shaped[rows] & samples
    inputs.counts[:n] = shaped & batch.is_penalized[rows]
    inputs.has_bias[:n] = shaped & batch.has_bias[rows]
    inputs.scores[:n] = shaped & (batch.num_logprobs[rows] >= 0)
    shaped_rows = rows[shaped]
    places = np.flatnonzero(shaped)
    for name in ("presence", "frequency", "repetition", "bad"):
        getattr(inputs, name)[places] = getattr(batch, name)[shaped_rows]
    inputs.newest[places] = batch.pending[shaped_rows]
    length = inputs.tail.shape[1]
    positions = ends[shaped][:, None] + np.arange(-length, 0)
    tokens = batch.token_ids[shaped_rows[:, None], np.maximum(positions, 0)]
    inputs.tail[places] = np.where(positions >= batch.num_prompt[shaped_rows][:, None], tokens, -1)
    return buffer


def _prompt_part(batch: PersistentBatch, rows: np.ndarray, counts: np.ndarray) -> PromptPart | None:
    """None where all that is computed of the prompts is their last token."""
    sources, token_ids, parts = [], [], []
    starts = np.cumsum(counts) - counts
    for index in np.flatnonzero(batch.num_prompt_logprobs[rows] >= 0):
        row, first = rows[index], int(batch.num_computed[rows[index]]) + 1
        count = min(first + int(counts[index]), int(batch.num_prompt[row])) - first
        if count > 0:
            sources.append(starts[index] + np.arange(count))
            token_ids.append(batch.token_ids[row, first : first + count])
            parts.append((int(index), first, count, int(batch.num_prompt_logprobs[row])))
    return PromptPart(np.concatenate(sources), np.concatenate(token_ids), tuple(parts)) if parts else None
