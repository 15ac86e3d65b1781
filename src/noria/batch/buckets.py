"""The fixed shapes everything is poured into, known before the first request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from noria.config import ResolvedConfig

MIN_TOKEN_BUCKET = 16
MIN_REQUEST_BUCKET = 8
MAX_ROWS_WITH_DRAFTS = 64  # with more rows the device has enough to do without guesses
MIN_ROWS = 2  # XLA computes one row alone by other code, whose results differ in the last bit


def token_buckets(max_num_batched_tokens: int, gap: int = 0, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """From 16 doubling until the budget is covered (gap 0), or doubling up to `gap` and then in steps of it.

    Only the last bucket may exceed the budget, by one rounding up. `extra` sizes are added where a step can use them.
    """
    sizes = [MIN_TOKEN_BUCKET]
    while sizes[-1] < max_num_batched_tokens:
        last = sizes[-1]
        sizes.append(last * 2 if gap == 0 or last * 2 <= gap else last + gap)
    every = sorted({*sizes, *extra})
    return tuple(every[: bisect_left(every, max_num_batched_tokens) + 1])


def request_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two from 8 up to max_num_seqs; the last one is max_num_seqs itself (2 where that is 1)."""
    sizes, size = [], MIN_REQUEST_BUCKET
    while size < max_num_seqs:
        sizes.append(size)
        size *= 2
    return (*sizes, max(max_num_seqs, MIN_ROWS))


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes, of one rank. tokens: of a step's forward pass; requests: of its head and sampler; with_drafts:
    the same of a step that verifies drafts, which has a row for each of them, too."""

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    with_drafts: tuple[int, ...] = ()

    @staticmethod
    def of(config: ResolvedConfig) -> Buckets:
        ranks = config.num_ranks
        tokens = token_buckets(config.max_num_batched_tokens, config.token_bucket_gap, config.extra_token_buckets)
        tokens, requests = share(tokens, ranks), share(request_buckets(config.max_num_seqs), ranks)
        if (most := rows_with_drafts(config)) == 0:
            return Buckets(tokens, requests)
        return Buckets(tokens, requests, tuple(sorted({*requests, *request_buckets(max(most, requests[-1]))})))

    @property
    def num_logit_rows(self) -> int:
        """The largest number of rows that a head pass may have."""
        return max(self.requests[-1], *self.with_drafts, 0)


def rows_with_drafts(config: ResolvedConfig) -> int:
    """Most rows of a head pass with drafts, over all requests of a rank: one for each of them, and one for each
    draft."""
    if (speculation := config.speculation) is None:
        return 0
    most = config.max_num_seqs // config.num_ranks * (1 + speculation.num_speculative_tokens)
    return min(most, MAX_ROWS_WITH_DRAFTS, config.max_num_batched_tokens // config.num_ranks)


def share(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Buckets of all ranks -> those of one, which all ranks are given alike."""
    return sizes if ranks == 1 else tuple(sorted({max(size // ranks, MIN_ROWS) for size in sizes}))


def pick(sizes: tuple[int, ...], count: int) -> int:
    """The first bucket that holds `count`. Raises ValueError when none does: the scheduler broke its budget."""
    index = bisect_left(sizes, count)
    if index == len(sizes):
        raise ValueError(f"{count} does not fit the largest bucket, {sizes[-1]}")
    return sizes[index]
