"""A step in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.cache.layout import BlockIds
from noria.engine.request import Request
from noria.scheduler.schedule import CachedRequest, NewRequest


@dataclass(slots=True)
class Plan:
    """A Schedule while it is made, and what update() must know when its result comes."""

    num_steps: int  # forward passes, see Schedule
    budgets: list[int]  # tokens that may still be scheduled, of each rank
    block_size: int
    new: list[NewRequest] = field(default_factory=list)
    cached: list[CachedRequest] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    drafts_left: list[int] = field(default_factory=list)  # how many may still be verified, of each rank
    sampling: list[tuple[Request, int]] = field(default_factory=list)  # those due for tokens, and for how many
    filling: list[Request] = field(default_factory=list)  # those that complete a block of the cache
    scoring: list[Request] = field(default_factory=list)  # those that wait for log-probabilities of their prompt
    preempted: bool = False  # whether somebody was

    def take(self, request: Request, num_tokens: int, drafts: list[int]) -> None:
        """From here on the tokens count as computed: the next step may be planned before this one has run.

        drafts: the last of the tokens. They count as if all were right until update() knows better.
        """
        before = request.num_computed_tokens
        request.num_computed_tokens = computed = before + num_tokens
        # A token is sampled behind the newest one, and in a burst or with drafts behind each that this adds.
        due = computed - (len(request.token_ids) + request.num_placeholders) + 1
        if due > 0:
            request.num_placeholders += due
            self.sampling.append((request, due))
        if computed // self.block_size != before // self.block_size:
            self.filling.append(request)
        if before < request.num_prompt_tokens - 1 and request.prompt_logprobs:
            self.scoring.append(request)
        self.num_tokens[request.request_id] = num_tokens
        self.budgets[request.rank] -= num_tokens
        if drafts:
            self.drafts[request.request_id] = drafts
            self.drafts_left[request.rank] -= len(drafts)


def cut_counts(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """The first of them, and as much as is left for the last, to `most` in total."""
    counts = dict[str, int]()
    for name, count in wanted.items():
        if most > 0:
            counts[name] = min(count, most)
        most -= count
    return counts


def new_request(request: Request, block_ids: BlockIds) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        sampling_params=request.sampling_params,
        stop_token_ids=request.stop_token_ids,
        key=request.key,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=block_ids,
        bad_sequences=request.bad_sequences,
        rank=request.rank,
    )
