"""What all ways to make drafts have in common, and how many drafts a request gets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from noria.config import SamplingParams


class DraftRequest(NamedTuple):
    """A sequence that could use drafts."""

    key: Hashable  # of the sequence, the same in every step
    request_id: str  # of the request that it is; another may have had it before
    token_ids: list[int]  # all that are known; it grows and is never changed otherwise
    num_drafts: int  # as many are wanted at most
    sampling_params: SamplingParams
    random_key: int  # the 64 bits that its tokens are sampled with
    cache_salt: str | None = None  # keeps prefix-cache entries of tenants apart
    rank: int = 0  # that has the request now


class Proposer(Protocol):
    """Guesses how sequences go on. What it keeps of one it keeps from the first call that names it until `forget`."""

    def may_propose(self, request: DraftRequest) -> bool:
        """Whether `propose` would probably have drafts for the sequence as it will be in a step or two: token_ids lack
        the tokens that the device is sampling. Quick, because it is asked of every sequence in every step."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each sequence 0 to num_drafts tokens, likely to be sampled next in this order."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence has ended; it need not be known."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets what ended sequences left, if it keeps anything of them."""
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


@dataclass(slots=True)
class DraftLength:
    """How many drafts one sequence gets: more while they are accepted, fewer and then none for a while otherwise.

    On a device that has nothing better to do a draft costs next to nothing; on a CPU every row costs. So a sequence
    that does not repeat itself must stop asking: after the n-th failure in a row it pauses for 2**n tokens.
    """

    most: int
    length: int = 0  # of the next drafts
    _failures: int = 0  # in a row: bursts of which nothing was accepted
    _paused_until: int = 0  # tokens that the sequence must have first

    def __post_init__(self) -> None:
        self.length = min(self.most, _FIRST_LENGTH)

    def wanted(self, num_tokens: int) -> int:
        """num_tokens: of the sequence now."""
        return self.length if num_tokens >= self._paused_until else 0

    def observe(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """What became of drafts; num_tokens: of the sequence with what came of it."""
        if num_accepted == num_drafts:
            self.length = min(self.most, max(self.length, 2 * num_drafts))
        else:
            self.length = max(num_accepted, 1)
        if num_accepted:
            self._failures = 0
        else:
            self._failures += 1
            self._paused_until = num_tokens + 2 ** min(self._failures, _LONGEST_PAUSE)


_FIRST_LENGTH = 3
_LONGEST_PAUSE = 6  # as a power of two
