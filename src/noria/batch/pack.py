"""From a schedule to the padded inputs of a step. Warm-up and serving both come through here, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from noria.batch.buckets import Buckets, pick
from noria.batch.inputs import ForwardInputs, SampleInputs, ShapingInputs
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
    steps: np.ndarray  # [n]: forward passes that each row takes part in; 1 but in a burst
    is_burst: bool  # its token bucket is its request bucket
    shaping: np.ndarray | None = None  # int32, see ShapingInputs; None where no row needs it
    num_logprobs: np.ndarray | None = None  # [n]: how many are asked for; -1 for none. None where shaping is
    prompt: PromptPart | None = None


def pack(schedule: Schedule, batch: PersistentBatch, buckets: Buckets) -> StepInputs:
    """Lays out one step of a batch to which the schedule has been applied.

    With scheduled tokens [2, 5, 3] the query starts are [0, 2, 7, 10], the offsets [0 1 0 1 2 3 4 0 1 2], and a token's
    position is its request's computed tokens plus its offset. Of a burst these are the inputs of the first pass.
    """
    scheduled = schedule.num_scheduled_tokens
    rows = np.fromiter((batch.row(request_id) for request_id in scheduled), np.int64, len(scheduled))
    counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
    steps, counts = (counts, np.ones_like(counts)) if schedule.is_burst else (np.ones_like(counts), counts)
    # Decode rows first, each with one token (a last chunk of one token is a decode to the attention kernel).
    order = np.argsort(counts > 1, kind="stable")
    rows, counts = rows[order], counts[order]
    num_decodes = int(np.count_nonzero(counts == 1))
    num_rows = pick(buckets.requests, len(rows))
    num_tokens = num_rows if schedule.is_burst else pick(buckets.tokens, int(counts.sum()))
    forward = _pack_forward(batch, num_tokens, rows, counts, num_decodes)
    ends = batch.num_computed[rows] + counts
    samples = ends >= batch.num_tokens[rows]
    # The sampled token of an unfinished prompt is dropped, so it need not be the right one.
    shaped = bool((batch.is_shaped[rows] & samples).any())
    if shaped and schedule.is_burst:
        raise ValueError("a burst has rows that are shaped: the scheduler must plan single steps for them")
    return StepInputs(
        forward=forward,
        sample=_pack_sample(batch, rows, ends, steps, num_rows),
        num_tokens=num_tokens,
        num_rows=num_rows,
        rows=rows,
        samples=samples,
        steps=steps,
        is_burst=schedule.is_burst,
        shaping=_pack_shaping(batch, rows, samples, num_rows) if shaped else None,
        num_logprobs=batch.num_logprobs[rows] if shaped else None,
        prompt=_prompt_part(batch, rows, counts) if (batch.num_prompt_logprobs[rows] >= 0).any() else None,
    )


def _pack_forward(
    batch: PersistentBatch, num_tokens: int, rows: np.ndarray, counts: np.ndarray, num_decodes: int
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
    inputs.logit_rows[:n] = starts[1:] - 1
    widest = int(batch.num_blocks[:, rows].max(initial=0))
    inputs.block_tables[:, :n, :widest] = batch.block_tables[:, rows, :widest]
    inputs.distribution[:] = num_decodes, num_decodes, n
    return buffer


def _pack_sample(
    batch: PersistentBatch, rows: np.ndarray, ends: np.ndarray, steps: np.ndarray, num_rows: int
) -> np.ndarray:
    n = len(rows)
    buffer, inputs = SampleInputs.allocate(num_rows)
    for name in ("temperature", "top_p", "min_p", "top_k", "num_stops", "banned_until", "stops"):
        getattr(inputs, name)[:n] = getattr(batch, name)[rows]
    inputs.key_low[:n], inputs.key_high[:n] = batch.key[rows].T
    inputs.position[:n] = ends
    inputs.num_steps[:n] = steps
    return buffer


def _pack_shaping(batch: PersistentBatch, rows: np.ndarray, samples: np.ndarray, num_rows: int) -> np.ndarray:
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
    positions = batch.num_tokens[shaped_rows][:, None] + np.arange(-length, 0)
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
