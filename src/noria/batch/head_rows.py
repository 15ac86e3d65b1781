"""The rows of the head pass of a step: which they are, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of the head pass: for every row of the step one, and one more for each draft."""

    rows: np.ndarray  # [m]: row of the step
    place: np.ndarray  # [m]: among those of its row
    back: np.ndarray  # [m]: how many of them come after it
    places: np.ndarray  # [most, n], see StepInputs

    @staticmethod
    def of(num_drafts: np.ndarray) -> HeadRows:
        """num_drafts: [n], of each row of the step."""
        counts = num_drafts + 1
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        place = np.arange(len(rows)) - first[rows]
        each = np.arange(counts.max(initial=1))[:, None]
        return HeadRows(rows, place, num_drafts[rows] - place, np.where(each < counts, first + each, -1))


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of the head pass lie in arrays that have `height` for each rank."""

    index: Any  # of [height] or, of several ranks, [ranks, height]
    numbers: np.ndarray  # [m]: the same in one row of numbers
    num_ranks: int
    height: int

    @staticmethod
    def of(sizes: Sequence[int], height: int) -> Places:
        """sizes: rows of each rank."""
        if len(sizes) == 1:
            return Places(slice(sizes[0]), np.arange(sizes[0]), 1, height)
        rank = np.repeat(np.arange(len(sizes)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        return Places((rank, row), rank * height + row, len(sizes), height)

    def among(self, chosen: np.ndarray) -> Any:
        """The index of those [m] that are true."""
        return np.flatnonzero(chosen) if self.num_ranks == 1 else tuple(part[chosen] for part in self.index)

    def of_rows(self, head: HeadRows | None) -> np.ndarray | None:
        """See StepInputs.places: by them what the device yields comes back to the order of the rows of the step, in
        which nothing is padding."""
        if self.num_ranks == 1:
            return None if head is None else head.places
        return self.numbers[None] if head is None else np.where(head.places >= 0, self.numbers[head.places], -1)
