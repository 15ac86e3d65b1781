"""The forward passes of one step: one, or several where its rows do not fit one shape.

Most steps have rows of up to most_model_len tokens, and are one pass in the shape with short block tables. Rows that
are longer need the long shape, which has fewer of them: a step that is more than it holds is divided among passes, each
with rows of its own. A row's place in the head pass is the same whatever passes there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.batch.buckets import pick
from noria.batch.head_rows import HeadRows
from noria.batch.inputs import BatchShape, ForwardInputs
from noria.batch.persistent import PersistentBatch


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of prompts whose log-probabilities a forward pass can compute: those behind tokens that it computes."""

    sources: np.ndarray  # [m]: of each the place, in the tokens of the pass, of the one before it
    token_ids: np.ndarray  # [m]
    rows: tuple[tuple[int, int, int, int], ...]  # row of the step, place of its first in the prompt, count, top-N

    @property
    def num_tokens(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class Execution:
    """The inputs of one forward pass."""

    forward: np.ndarray  # int32, see ForwardInputs.of_ranks
    num_tokens: int  # token bucket, times the number of ranks
    is_long: bool = False  # its shape is BatchShape.long
    owned: np.ndarray | None = None  # bool [L]: rows of the head pass that are its own; None where it is the only one
    prompt: PromptPart | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, in its order."""

    rows: np.ndarray  # [n]: of the persistent batch
    counts: np.ndarray  # [n]: tokens that each computes, its drafts included
    num_drafts: np.ndarray | None  # [n]; None for no drafts

    def head_rows(self, part: Any) -> HeadRows | None:
        """part: an index of some rows."""
        return None if self.num_drafts is None else HeadRows.of(self.num_drafts[part])


def pack_forward(
    batch: PersistentBatch, step: StepRows, parts: Sequence[slice], sizes: tuple[int, ...]
) -> tuple[Execution, ...]:
    """parts: the rows of each rank. sizes: token buckets."""
    shape, long = batch.shape, batch.shape.long
    if long is None or shape.most_model_len is None:
        return (_execution(batch, shape, step, parts, sizes),)
    is_long = batch.num_computed[step.rows] + step.counts > shape.most_model_len
    if not is_long.any():
        return (_execution(batch, shape, step, parts, sizes),)
    if len(is_long) <= long.num_rows:
        return (_execution(batch, long, step, parts, sizes),)
    head = step.head_rows(slice(None))
    of_head = np.arange(len(is_long)) if head is None else head.rows  # [m]: row of the step
    return tuple(
        _execution(batch, each, step, [chosen], sizes, np.flatnonzero(np.isin(of_head, chosen)))
        for each, chosen in _divide(is_long, shape, long)
    )


def _divide(is_long: np.ndarray, shape: BatchShape, long: BatchShape) -> Iterator[tuple[BatchShape, np.ndarray]]:
    """Shapes, and which rows of the step pass in them: those that are short together, the others as many at a time as
    there is room for."""
    short_rows, long_rows = np.flatnonzero(~is_long), np.flatnonzero(is_long)
    if len(short_rows):
        yield shape, short_rows
    for first in range(0, len(long_rows), long.num_rows):
        yield long, long_rows[first : first + long.num_rows]


def _execution(
    batch: PersistentBatch,
    shape: BatchShape,
    step: StepRows,
    parts: Sequence[Any],
    sizes: tuple[int, ...],
    places: np.ndarray | None = None,
) -> Execution:
    """parts: indices of the rows of the step that each rank computes. places: of these in the head pass; None: they are
    the first of their rank."""
    width = pick(sizes, max(int(step.counts[part].sum()) for part in parts))
    buffers = [_pack_rank(batch, shape, width, step, part, places) for part in parts]
    owned = None
    if places is not None:
        owned = np.zeros(shape.num_logit_rows, bool)
        owned[places] = True
    return Execution(
        forward=buffers[0] if len(buffers) == 1 else np.stack(buffers),
        num_tokens=width * len(parts),
        is_long=shape is batch.shape.long,
        owned=owned,
        prompt=_prompt_part(batch, step, parts, width) if (batch.num_prompt_logprobs[step.rows] >= 0).any() else None,
    )


def _pack_rank(
    batch: PersistentBatch, shape: BatchShape, num_tokens: int, step: StepRows, part: Any, places: np.ndarray | None
) -> np.ndarray:
    """Of one rank. part, places: see _execution."""
    rows, counts, head = step.rows[part], step.counts[part], step.head_rows(part)
    n, total = len(rows), int(counts.sum())
    buffer, inputs = ForwardInputs.allocate(shape, num_tokens)
    starts = np.concatenate([[0], np.cumsum(counts)])  # [n + 1]
    token_rows = np.repeat(np.arange(n), counts)  # [total]
    positions = batch.num_computed[rows][token_rows] + np.arange(total) - starts[token_rows]
    inputs.token_ids[:total] = batch.token_ids[rows[token_rows], positions]
    inputs.token_sources[:] = -1
    newest = positions == batch.num_tokens[rows][token_rows] - 1
    inputs.token_sources[:total] = np.where(newest, batch.pending[rows][token_rows], -1)
    inputs.positions[:total] = positions
    inputs.token_rows[:] = shape.num_rows
    inputs.token_rows[:total] = token_rows
    inputs.query_start[:] = total
    inputs.query_start[: n + 1] = starts
    inputs.seq_lens[:n] = batch.num_computed[rows] + counts
    last = starts[1:] - 1 if head is None else starts[1:][head.rows] - 1 - head.back
    inputs.logit_rows[slice(len(last)) if places is None else places] = last
    # A row that once had longer drafts may have a block that it does not need yet, nor its shape have an entry for.
    widest = min(int(batch.num_blocks[:, rows].max(initial=0)), shape.num_blocks)
    inputs.block_tables[:, :n, :widest] = batch.block_tables[:, rows, :widest]
    num_decodes = int(np.count_nonzero(counts == 1))
    inputs.distribution[:] = num_decodes, num_decodes, n
    return buffer


def _prompt_part(batch: PersistentBatch, step: StepRows, parts: Sequence[Any], width: int) -> PromptPart | None:
    """None where all that is computed of the prompts is their last token. width: tokens of a rank, with padding."""
    rows, counts = step.rows, step.counts
    sources, token_ids, found = [], [], []
    starts = np.concatenate([r * width + np.cumsum(counts[part]) - counts[part] for r, part in enumerate(parts)])
    indices = np.concatenate([np.arange(len(rows))[part] for part in parts])
    for index, start in zip(indices.tolist(), starts.tolist()):
        row, first = rows[index], int(batch.num_computed[rows[index]]) + 1
        if (num_top := int(batch.num_prompt_logprobs[row])) < 0:
            continue
        count = min(first + int(counts[index]), int(batch.num_prompt[row])) - first
        if count > 0:
            sources.append(start + np.arange(count))
            token_ids.append(batch.token_ids[row, first : first + count])
            found.append((index, first, count, num_top))
    return PromptPart(np.concatenate(sources), np.concatenate(token_ids), tuple(found)) if found else None
