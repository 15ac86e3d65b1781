"""Drafts for the requests that run: asked for, cut to what may be verified, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from noria.engine.request import Request
from noria.engine.structured import StructuredRequests
from noria.scheduler.schedule import Schedule, StepResult
from noria.spec.proposer import DraftLength, DraftRequest, Proposer
from noria.spec.stats import SpeculationCounts, SpeculationStats

Drafts = dict[str, list[int]]  # by request id


class Speculation:
    """From the first drafts of a request to `forget`. A step with drafts is planned with all tokens known and reported
    before the next is planned, so that nobody has to guess what came of them."""

    def __init__(self, proposer: Proposer | None, num_speculative_tokens: int = 0) -> None:
        """proposer: None for no speculation. num_speculative_tokens: most drafts of a request in a step."""
        self._proposer = proposer
        self._most = num_speculative_tokens
        self._lengths: dict[Request, DraftLength] = {}
        self._drafted: dict[str, Request] = {}  # of the last drafts, by id
        self._counts = SpeculationCounts(num_speculative_tokens)

    @property
    def stats(self) -> SpeculationStats:
        return self._counts.stats

    def may_propose(self, requests: Iterable[Request]) -> bool:
        """Whether it is worth waiting for the tokens that the device is sampling: some request would get drafts."""
        proposer = self._proposer
        if proposer is None:
            return False
        return any(
            proposer.may_propose(wanted)
            for request in requests
            if request.num_placeholders and (wanted := self._wanted(request)) is not None
        )

    def propose(self, requests: Iterable[Request], structured: StructuredRequests) -> Drafts:
        """For those that decode and whose tokens are all known."""
        if self._proposer is None:
            return {}
        decoding = [r for r in requests if not r.num_placeholders and r.num_computed_tokens == r.num_tokens - 1]
        able = [(request, wanted) for request in decoding if (wanted := self._wanted(request)) is not None]
        if not able:
            return {}
        proposed = self._proposer.propose([wanted for _, wanted in able])
        self._drafted, drafts = {}, Drafts()
        for (request, _), token_ids in zip(able, proposed, strict=True):
            token_ids = structured.cut(request, _before_stop(request, token_ids))
            if token_ids:
                self._drafted[request.request_id] = request
                drafts[request.request_id] = token_ids
        return drafts

    def observe(self, schedule: Schedule, result: StepResult) -> None:
        """What came of the last drafts, as far as they were scheduled; the requests have the tokens."""
        for request_id, token_ids in schedule.draft_token_ids.items():
            num_accepted = max(len(result.sampled_token_ids[request_id]) - 1, 0)
            self._counts.add(len(token_ids), num_accepted)
            request = self._drafted[request_id]
            if not request.is_finished:
                self._length(request).observe(len(token_ids), num_accepted, request.num_tokens)

    def forget(self, requests: Sequence[Request]) -> None:
        """Of finished requests."""
        if self._proposer is not None:
            for request in requests:
                self._lengths.pop(request, None)
                self._proposer.forget(request)

    def reset_prefix_cache(self) -> None:
        if self._proposer is not None:
            self._proposer.reset_prefix_cache()

    def close(self) -> None:
        if self._proposer is not None:
            self._proposer.close()

    def _wanted(self, request: Request) -> DraftRequest | None:
        """None where no draft could be of use: the last token that is allowed comes without any."""
        room = request.max_num_tokens - 1 - request.num_tokens
        num_drafts = min(self._length(request).wanted(request.num_tokens), room)
        if num_drafts <= 0:
            return None
        return DraftRequest(
            request,
            request.request_id,
            request.token_ids,
            num_drafts,
            request.sampling_params,
            request.key,
            request.cache_salt,
            request.rank,
        )

    def _length(self, request: Request) -> DraftLength:
        if request not in self._lengths:
            self._lengths[request] = DraftLength(self._most)
        return self._lengths[request]


def _before_stop(request: Request, token_ids: list[int]) -> list[int]:
    """Without what follows the end of the request: if it comes, it comes as the token after the accepted drafts."""
    ends = [place for place, token_id in enumerate(token_ids) if token_id in request.stop_token_ids]
    return token_ids[: ends[0]] if ends else token_ids
