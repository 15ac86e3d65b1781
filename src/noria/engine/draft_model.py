"""A smaller model that drafts: with a runner, a paged cache and rows of its own, driven by schedules like the target.

It samples as the target does, with the same random key at the same positions, so that it guesses right whenever the two
agree on the draw; what changes logits token by token (penalties, biases, grammars) it does not know of. One call makes
at most two steps: in the first each sequence catches up with the tokens it has, as far as the budget of a step reaches,
and those that have caught up get their first draft; the second is a burst that makes the others, on the device alone.

It has as many ranks as the target, and a sequence is on that of its request, so no rank ever has more than it has rows
for.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import Request
from noria.runner.runner import ModelRunner, SampledTokens
from noria.scheduler.schedule import CachedRequest, NewRequest, Schedule
from noria.spec.proposer import DraftRequest


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of the target as the draft's cache sees it."""

    request: Request  # its token ids are the target's own list; computed are those in the draft's cache
    drafts: list[int] = field(default_factory=list)  # the last ones, of which all but the last are in the cache
    num_known: int = 0  # tokens before them
    is_known: bool = False  # to the runner

    def catch_up(self) -> int:
        """Keeps what is right of the last drafts in the cache; returns how many tokens are missing there."""
        request = self.request
        if self.drafts:
            came = request.token_ids[self.num_known : self.num_known + len(self.drafts) - 1]
            right = next((i for i, (one, two) in enumerate(zip(came, self.drafts)) if one != two), len(came))
            request.num_computed_tokens = min(self.num_known + right, request.num_tokens - 1)
            self.drafts = []
        return request.num_tokens - request.num_computed_tokens


class DraftModelProposer:
    def __init__(self, runner: ModelRunner, caches: Sequence[PagedCache]) -> None:
        """runner: ready to serve; its bursts must be long enough. caches: bookkeeping of the blocks of each rank."""
        self._runner = runner
        self._caches = tuple(caches)
        self._budget = runner.config.max_num_batched_tokens // len(caches)  # of a rank
        # The most tokens that a sequence may compute before its blocks are looked at again.
        self._max_chunk = min(self._budget + runner.config.num_scheduler_steps, runner.config.max_model_len)
        self._serial = itertools.count()
        self._sequences: dict[Hashable, _Sequence] = {}  # those used last come last
        self._seated: list[str] = []  # ids that have a row
        self._finished: list[str] = []  # ids that the runner may forget

    def may_propose(self, request: DraftRequest) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        turn = [(request, self._sequence(request)) for request in requests]
        counts = self._counts(turn)
        if not counts:
            return [[] for _ in requests]
        computing = [(wanted, each) for wanted, each in turn if each.request.request_id in counts]
        steps = [self._run(self._first_schedule([each for _, each in computing], counts))]
        more: dict[str, int] = {}
        for wanted, each in computing:
            request = each.request
            request.num_computed_tokens += counts[request.request_id]
            self._cache(request).commit(request)
            if request.num_computed_tokens == request.num_tokens and wanted.num_drafts > 1:
                more[request.request_id] = wanted.num_drafts - 1
        if more:
            steps.append(self._run(self._burst([each.request for _, each in computing], more)))
        results = [step.result().sampled_token_ids for step in steps]
        for _, each in computing:
            request_id = each.request.request_id
            each.drafts = [token for result in results for token in result.get(request_id, [])]
            each.num_known = each.request.num_tokens
        return [list(itertools.takewhile(lambda token: token >= 0, each.drafts)) for _, each in turn]

    def forget(self, key: Hashable) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        self._unseat(sequence.request)
        if sequence.is_known:
            self._finished.append(sequence.request.request_id)

    def reset_prefix_cache(self) -> None:
        for cache in self._caches:
            cache.reset_prefix_cache()

    def close(self) -> None:
        self._runner.close()

    def _cache(self, request: Request) -> PagedCache:
        return self._caches[request.rank]

    def _is_seated(self, request: Request) -> bool:
        return self._cache(request).has_table(request.request_id)

    def _unseat(self, request: Request) -> None:
        if self._is_seated(request):
            self._cache(request).free(request)

    def _sequence(self, wanted: DraftRequest) -> _Sequence:
        sequence = self._sequences.pop(wanted.key, None)
        if sequence is None:
            p = wanted.sampling_params
            params = SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
            request = Request(str(next(self._serial)), [], params, key=wanted.random_key, cache_salt=wanted.cache_salt)
            request.token_ids = wanted.token_ids
            sequence = _Sequence(request)
        if sequence.request.rank != wanted.rank:
            self._unseat(sequence.request)
            sequence.request.rank = wanted.rank
        self._sequences[wanted.key] = sequence
        return sequence

    def _counts(self, turn: list[tuple[DraftRequest, _Sequence]]) -> dict[str, int]:
        """How many tokens each computes in the first step, those with the fewest missing first. Takes their blocks,
        and those of the drafts that follow."""
        counts, budgets = dict[str, int](), [self._budget] * len(self._caches)
        here = {sequence.request.request_id for _, sequence in turn}
        seated = [(request, sequence) for request, sequence in turn if self._seat(sequence, here)]
        missing = {sequence: sequence.catch_up() for _, sequence in seated}
        for wanted, sequence in sorted(seated, key=lambda pair: missing[pair[1]]):
            request = sequence.request
            count = min(missing[sequence], budgets[request.rank])
            more = wanted.num_drafts - 1 if count == missing[sequence] else 0
            if count and self._grow(request, count + more, here):
                counts[request.request_id] = count
                budgets[request.rank] -= count
        return counts

    def _seat(self, sequence: _Sequence, here: set[str]) -> bool:
        """Whether it has a table, if need be in place of sequences that are not drafted for now."""
        request = sequence.request
        if self._is_seated(request):
            return True
        cache = self._cache(request)
        sequence.drafts = []
        hit = cache.lookup(request)
        while cache.admit(request, hit, 0, self._max_chunk) is None:
            if not self._evict(request.rank, here):
                return False
            hit = cache.lookup(request)
        request.num_computed_tokens = hit.num_tokens
        return True

    def _grow(self, request: Request, num_tokens: int, here: set[str]) -> bool:
        while self._cache(request).allocate(request, num_tokens) is None:
            if not self._evict(request.rank, here):
                return False
        return True

    def _evict(self, rank: int, here: set[str]) -> bool:
        """Takes the blocks of the sequence of the rank that was not drafted for the longest; it starts over when it is
        again."""
        for sequence in self._sequences.values():
            request = sequence.request
            if request.rank == rank and request.request_id not in here and self._is_seated(request):
                self._unseat(request)
                return True
        return False

    def _first_schedule(self, sequences: list[_Sequence], counts: dict[str, int]) -> Schedule:
        """Everybody is seated anew, with the tokens that the target has and the blocks that are right now."""
        new, cached, finished = [], [], tuple(self._finished)
        preempted = tuple(request_id for request_id in self._seated if request_id not in finished)
        self._finished, self._seated = [], list(counts)
        for sequence in sequences:
            request = sequence.request
            blocks, token_ids = self._cache(request).block_ids(request.request_id), list(request.token_ids)
            if sequence.is_known:
                cached.append(
                    CachedRequest(
                        request.request_id, request.num_computed_tokens, blocks, True, token_ids, request.rank
                    )
                )
            else:
                new.append(_new_request(request, blocks, token_ids))
                sequence.is_known = True
        return Schedule(
            new_requests=tuple(new),
            cached_requests=tuple(cached),
            num_scheduled_tokens=counts,
            finished_ids=finished,
            preempted_ids=preempted,
        )

    def _burst(self, requests: list[Request], counts: dict[str, int]) -> Schedule:
        """The passes after the first drafts: the blocks are there, and the drafts are on the device."""
        nothing: tuple[list[int], ...] = tuple([] for _ in self._caches[0].layout.groups)
        return Schedule(
            cached_requests=tuple(
                CachedRequest(request.request_id, request.num_tokens, nothing)
                for request in requests
                if request.request_id in counts
            ),
            num_scheduled_tokens=counts,
            num_steps=max(counts.values()),
        )

    def _run(self, schedule: Schedule) -> SampledTokens:
        self._runner.execute_model(schedule)
        return self._runner.sample_tokens()


def _new_request(request: Request, block_ids: tuple[list[int], ...], token_ids: list[int]) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=token_ids,
        sampling_params=request.sampling_params,
        stop_token_ids=frozenset(),  # what follows an end is cut off later
        key=request.key,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=request.num_computed_tokens,
        block_ids=block_ids,
        rank=request.rank,
    )
