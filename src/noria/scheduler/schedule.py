"""What the scheduler decides for one step: the only thing the model runner is told.

The shape follows what vLLM's scheduler emits, so that either can drive the runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from noria.cache.layout import BlockIds
from noria.config import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner has never seen (or was told to forget)."""

    request_id: str
    token_ids: list[int]  # prompt (and any output it already has)
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # as in Request
    key: int
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    block_ids: BlockIds  # all blocks that cover computed + scheduled tokens
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # as in Request
    rank: int = 0  # whose blocks they are


class CachedRequest(NamedTuple):
    """A request the runner knows. `resumed`: it was preempted, so `block_ids` and `token_ids` replace what it had.

    A tuple, because there is one per request and step, and tuples are made fastest.
    """

    request_id: str
    num_computed_tokens: int
    new_block_ids: BlockIds  # to append; the whole table when resumed
    resumed: bool = False
    token_ids: list[int] | None = None  # only when resumed
    rank: int = 0  # the same


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. Apply in this order: finished, preempted, new, cached."""

    new_requests: tuple[NewRequest, ...] = ()
    cached_requests: tuple[CachedRequest, ...] = ()
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # request id -> tokens (>= 1)
    num_steps: int = 1  # forward passes; see is_burst
    # Guesses at what follows the newest token of a request: its last scheduled tokens, to be verified.
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    finished_ids: tuple[str, ...] = ()  # since the last step: the runner forgets them
    preempted_ids: tuple[str, ...] = ()  # lost their blocks; remembered for a resume

    @property
    def is_burst(self) -> bool:
        """Several forward passes in a row, in which every request decodes: one token in each of the first so many as
        it is scheduled for, unless a stop token ends it before. The largest number is num_steps."""
        return self.num_steps > 1

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens may come next of the requests that follow a grammar. One with drafts has a row for what may follow
    now, and one for what may follow after each of its drafts, in this order."""

    request_ids: tuple[str, ...]  # of the rows, the requests in any order
    bitmask: np.ndarray  # int32 [rows, ceil(vocabulary / 32)]: bit b of word w is 1 where token 32 * w + b may come


# In place of a sampled token, when there is none.

# (token id, log-probability, rank) of a token, and of the likeliest ones in its place.
TokenLogprobs = tuple[tuple[int, float, int], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yields per request, on the host: the tokens sampled (empty while the prompt is unfinished; in a
    burst as many as scheduled, or fewer when the last one ends the request; with drafts those that were right and one
    more; NO_TOKEN or NOTHING_ALLOWED where there is none), and log-probabilities for those that asked."""

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of the tokens sampled
    # Of the prompt's tokens that follow those computed: the place of the first in the prompt, and theirs.
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
