"""What became of drafts, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Since the start; all 0 without speculation. A burst is what one request has verified in one step."""

    num_drafts: int = 0  # bursts
    num_draft_tokens: int = 0  # proposed and verified
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # by place in the burst, the first draft first
    proposed_per_position: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a burst yields, the one that follows the accepted drafts included; 1 where there is none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class SpeculationCounts:
    def __init__(self, most: int) -> None:
        """most: drafts of a burst."""
        self._bursts = 0
        self._proposed = [0] * most
        self._accepted = [0] * most

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self._bursts += 1
        for place in range(num_drafts):
            self._proposed[place] += 1
            self._accepted[place] += place < num_accepted

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._bursts, sum(self._proposed), sum(self._accepted), tuple(self._accepted), tuple(self._proposed)
        )
