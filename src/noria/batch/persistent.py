"""The batch that lives across steps: one row per running request, changed only where a schedule says so."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from noria.batch.edits import biases_of, row_edits
from noria.batch.inputs import NOT_SAMPLED, BatchShape, SampleInputs, ShapingInputs
from noria.config import SamplingParams
from noria.scheduler.schedule import CachedRequest, NewRequest, Schedule

# Beyond these float32 does not hold the temperature or its reciprocal, and minus infinity times 0 would be no number.
_TEMPERATURES = (1e-30, 1e30)


@dataclass(slots=True)
class _Remembered:
    """What a schedule says only once about a request."""

    sampling_params: SamplingParams
    stop_token_ids: tuple[int, ...]  # that the device is told
    key: int
    num_prompt_tokens: int
    bad_sequences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """Tokens that a step is sampling. Arrays have one entry per row that gets one."""

    number: int  # counts up
    rows: np.ndarray
    places: np.ndarray  # in the rows' token ids, of the first one
    counts: np.ndarray  # tokens, one after the other
    generations: np.ndarray


class PersistentBatch:
    """Host arrays with a row per running request. Rows keep their place while their request runs.

    A step reads the rows in an order of its own (decode rows first, see pack), so nothing is ever moved to close gaps.
    """

    def __init__(self, shape: BatchShape, max_model_len: int) -> None:
        rows = shape.all_rows
        self.shape = shape
        self.request_ids: list[str | None] = [None] * rows
        self.token_ids = np.zeros((rows, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)  # known token ids
        self.num_computed = np.zeros(rows, np.int32)
        self.block_tables = np.zeros((shape.num_groups, rows, shape.num_blocks), np.int32)
        self.num_blocks = np.zeros((shape.num_groups, rows), np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.key = np.zeros((rows, 2), np.int32)  # low and high half
        self.stops = np.zeros((rows, SampleInputs.MAX_STOPS), np.int32)
        self.num_stops = np.zeros(rows, np.int32)
        self.banned_until = np.zeros(rows, np.int32)  # number of tokens at which the ban ends
        self.num_prompt = np.zeros(rows, np.int32)
        self.is_shaped = np.zeros(rows, bool)  # see SamplingParams; what follows counts where it is true
        self.is_structured = np.zeros(rows, bool)  # follows a grammar; is shaped, too
        self.is_penalized = np.zeros(rows, bool)
        self.has_bias = np.zeros(rows, bool)
        self.presence = np.zeros(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.repetition = np.ones(rows, np.float32)
        self.bad = np.full((rows, ShapingInputs.MAX_BAD, ShapingInputs.MAX_BAD_LENGTH), -1, np.int32)
        self.num_logprobs = np.full(rows, -1, np.int32)  # -1 for none
        self.num_prompt_logprobs = np.full(rows, -1, np.int32)
        self._edits: list[np.ndarray] = []  # of the device's tables, for rows that were occupied since they were taken
        # Where the row's newest token lies among the tokens of the step in flight; -1 when the host knows it.
        self.pending = np.full(rows, -1, np.int32)
        self.num_expectations = 0
        self.generation = np.zeros(rows, np.int64)  # counts the requests a row has served
        # Of each rank.
        self._free = [list(range(first, first + shape.num_rows)) for first in range(0, rows, shape.num_rows)]
        self._rows: dict[str, int] = {}
        self._remembered: dict[str, _Remembered] = {}

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    @property
    def num_requests(self) -> int:
        """Running ones and preempted ones."""
        return len(self._remembered)

    def apply(self, schedule: Schedule) -> None:
        """Finished out, preempted out but remembered, new and resumed in (lowest free row first), tables extended.

        An id that is both finished and new is two requests: it was aborted and submitted again.
        """
        for request_id in schedule.finished_ids:
            self._release(request_id)
            self._remembered.pop(request_id, None)
        for request_id in schedule.preempted_ids:
            self._release(request_id)
        for new in schedule.new_requests:
            self._remember(new)
            self._occupy(new, new.token_ids, new.block_ids)
        for cached in schedule.cached_requests:
            self._continue(cached)
        for request_id, drafts in schedule.draft_token_ids.items():
            row = self._rows[request_id]
            first = self.num_tokens[row]
            self.token_ids[row, first : first + len(drafts)] = drafts  # behind what is known

    def extend(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        """More blocks of a request that has a row."""
        for group, ids in enumerate(block_ids):
            self._extend_table(group, self._rows[request_id], ids)

    def take_edits(self) -> list[np.ndarray]:
        """What the next step must find in the device's tables and is not yet there, see edits.py."""
        edits, self._edits = self._edits, []
        return edits

    def expect(self, rows: np.ndarray, sources: np.ndarray, counts: np.ndarray) -> Expectation:
        """Makes room for tokens being sampled: row rows[i] gets counts[i] tokens from row sources[i] of the step just
        dispatched. Fewer may come to one that ends with them, or whose drafts are wrong; see fulfil."""
        places = self.num_tokens[rows]
        self.num_tokens[rows] += counts
        self.pending[:] = -1
        self.pending[rows] = sources
        self.num_expectations += 1
        return Expectation(self.num_expectations, rows, places, counts, self.generation[rows])

    def fulfil(self, expected: Expectation, token_ids: np.ndarray) -> None:
        """The host knows the tokens now: token_ids [most tokens of a row, rows], NOT_SAMPLED behind the last of a row.

        A row that was given to another request meanwhile is left alone.
        """
        same = self.generation[expected.rows] == expected.generations
        came = same & (np.arange(len(token_ids))[:, None] < expected.counts) & (token_ids != NOT_SAMPLED)
        step, row = np.nonzero(came)
        self.token_ids[expected.rows[row], expected.places[row] + step] = token_ids[step, row]
        self.num_tokens[expected.rows[same]] -= (expected.counts - came.sum(axis=0))[same]
        if expected.number == self.num_expectations:
            self.pending[:] = -1

    def _remember(self, new: NewRequest) -> None:
        stops = tuple(sorted(new.stop_token_ids))
        if not new.sampling_params.min_tokens:
            # The device would only end a burst at them. Those that it does not know are found by the host afterwards.
            stops = stops[: SampleInputs.MAX_STOPS]
        self._remembered[new.request_id] = _Remembered(
            new.sampling_params, stops, new.key, new.num_prompt_tokens, new.bad_sequences
        )

    def _continue(self, cached: CachedRequest) -> None:
        if cached.resumed:
            assert cached.token_ids is not None
            self._occupy(cached, cached.token_ids, cached.new_block_ids)
            return
        row = self._rows[cached.request_id]
        self.num_computed[row] = cached.num_computed_tokens
        self.extend(cached.request_id, cached.new_block_ids)

    def _occupy(
        self, request: NewRequest | CachedRequest, token_ids: list[int], block_ids: tuple[list[int], ...]
    ) -> None:
        row = self._rows[request.request_id] = heapq.heappop(self._free[request.rank])
        self.request_ids[row] = request.request_id
        self.generation[row] += 1
        self.pending[row] = -1
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[:, row] = 0
        for group, ids in enumerate(block_ids):
            self._extend_table(group, row, ids)
        kept = self._remembered[request.request_id]
        params = kept.sampling_params
        self.temperature[row] = np.clip(params.temperature, *_TEMPERATURES) if params.temperature else 0
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.top_k[row] = min(max(params.top_k, 0), 2**31 - 1)
        self.key[row] = np.array([kept.key & (2**64 - 1)], np.uint64).view(np.int32)
        self.num_stops[row] = len(kept.stop_token_ids)
        self.stops[row, : len(kept.stop_token_ids)] = kept.stop_token_ids
        self.banned_until[row] = kept.num_prompt_tokens + params.min_tokens
        self.num_prompt[row] = kept.num_prompt_tokens
        self.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.is_shaped[row] = params.is_shaped
        self.is_structured[row] = params.structured_outputs is not None
        if params.is_shaped:
            self._shape(row, kept, token_ids)

    def _shape(self, row: int, kept: _Remembered, token_ids: list[int]) -> None:
        params = kept.sampling_params
        self.is_penalized[row] = params.is_penalized
        self.presence[row], self.frequency[row] = params.presence_penalty, params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.bad[row] = -1
        longer = [sequence for sequence in kept.bad_sequences if len(sequence) > 1]
        for place, sequence in enumerate(longer):
            self.bad[row, place, -len(sequence) :] = sequence
        biases = biases_of(params, [sequence[0] for sequence in kept.bad_sequences if len(sequence) == 1])
        self.has_bias[row] = bool(biases)
        if biases or params.is_penalized:
            self._edits += row_edits(row, params, biases, token_ids, kept.num_prompt_tokens)

    def _extend_table(self, group: int, row: int, ids: list[int]) -> None:
        start = self.num_blocks[group, row]
        self.block_tables[group, row, start : start + len(ids)] = ids
        self.num_blocks[group, row] = start + len(ids)

    def _release(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.request_ids[row] = None
            heapq.heappush(self._free[row // self.shape.num_rows], row)
