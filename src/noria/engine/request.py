"""The request state machine (host side, plain Python)."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from noria.config import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # this request alone failed


def derive_seed(seed: int, index: int = 0) -> int:
    """The 64-bit random key of the `index`-th sequence of a request (`n > 1`) whose user-visible seed is `seed`.

    Every bit of the result depends on both arguments, so neighbouring seeds give unrelated streams.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(eq=False, slots=True)
class Request:
    """One sequence: prompt, what was generated, and how much of it the KV cache holds.

    There is no prefill phase and no decode phase: each step lets `num_computed_tokens` catch up with `num_tokens`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    key: int  # 64-bit random key, see derive_seed
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence (unless ignored) and the request's own
    cache_salt: str | None = None  # keeps prefix-cache entries of tenants apart
    priority: int = 0
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # bad_words as token ids; their last tokens are not sampled
    arrival: int = 0  # running number, set by the scheduler
    scheduled_time: float | None = None  # time.perf_counter() when it first left the queue, set by the scheduler
    max_num_tokens: int = 0  # of prompt and output, set by the scheduler: there the request ends at the latest
    rank: int = 0  # that it belongs to since it was last admitted, see scheduler/ranks.py

    token_ids: list[int] = field(default_factory=list)  # prompt + output
    num_computed_tokens: int = 0  # those of steps in flight included
    num_placeholders: int = 0  # tokens that steps in flight are sampling
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it, or its own error
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks of token_ids; filled by `cache`
    # Each a tuple of (token id, log-probability, rank): the token itself, then the likeliest, if asked for.
    logprobs: list[tuple[tuple[int, float, int], ...]] = field(default_factory=list)  # of the generated tokens
    # Of the prompt's tokens but the first, None where not (yet) computed; empty when nobody asked.
    prompt_logprobs: list[tuple[tuple[int, float, int], ...] | None] = field(default_factory=list)
    is_shaped: bool = field(init=False)  # see SamplingParams

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.is_shaped = self.sampling_params.is_shaped
        if self.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * (len(self.prompt_token_ids) - 1)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a step may compute, those that are still being sampled included.

        The last token that max_tokens or max_model_len allow is nobody's input.
        """
        num_tokens = len(self.token_ids) + self.num_placeholders
        return num_tokens if num_tokens < self.max_num_tokens else self.max_num_tokens - 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether some are missing: what is found in the prefix cache would leave a gap."""
        return None in self.prompt_logprobs

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def append(self, token_id: int) -> None:
        """Takes a sampled token and finishes the request when the token or a length limit ends it."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling_params.min_tokens:
            self.finish(FinishReason.STOP, token_id)
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish(FinishReason.LENGTH)
