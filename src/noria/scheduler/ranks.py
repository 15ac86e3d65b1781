"""Which rank a request belongs to, and what each rank has: blocks with a prefix index, rows, and a budget of tokens.

A rank is a group of devices that keeps the cache of its requests and computes their attention. All ranks take part in
every step, each with as many rows and tokens as the one that has the most, so the slowest rank is the speed of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from noria.cache.layout import BlockIds
from noria.cache.paged_cache import CacheStats, PagedCache, PrefixHit
from noria.engine.request import Request

Growth = Sequence[tuple[Request, int]]  # requests, and the tokens that each is to get room for


class Ranks:
    def __init__(
        self, cache: PagedCache | Sequence[PagedCache], max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """cache: one for each rank, all alike. The limits are those of all ranks together."""
        self.caches = (cache,) if isinstance(cache, PagedCache) else tuple(cache)
        self.max_num_seqs = max_num_seqs // len(self.caches)  # of one rank, like what follows
        self.max_num_batched_tokens = max_num_batched_tokens // len(self.caches)
        self.num_running = [0] * len(self.caches)

    @property
    def stats(self) -> CacheStats:
        """The sums."""
        each = [dataclasses.astuple(cache.stats) for cache in self.caches]
        return CacheStats(*map(sum, zip(*each)))

    def budgets(self, num_steps: int) -> list[int]:
        return [num_steps * self.max_num_batched_tokens] * len(self.caches)

    def room_for_drafts(self, rows_with_drafts: int) -> list[int]:
        """How many drafts each rank may verify beside the requests that run."""
        return [min(rows_with_drafts, self.max_num_batched_tokens) - count for count in self.num_running]

    def places_for(
        self, request: Request, running: Sequence[Request], budgets: Sequence[int]
    ) -> list[tuple[int, PrefixHit]]:
        """The ranks that have a row and budget left, the best first, and what the cache of each holds of the request.

        The best is the one that has the least to do once it has the request: the tokens of those that run there, which
        every step of theirs reads, and the tokens of this one that are not in its cache. So a request goes where its
        prefix is, unless that rank has more to do by more than the prefix saves; and of a prefix that everybody shares
        there will soon be a copy on every rank.
        """
        free = [r for r, count in enumerate(self.num_running) if budgets[r] > 0 and count < self.max_num_seqs]
        hits = [(rank, self.caches[rank].lookup(request)) for rank in free]
        if len(hits) > 1:
            load = Counter[int]()
            for other in running:
                load[other.rank] += other.num_tokens
            hits.sort(key=lambda place: load[place[0]] - place[1].num_tokens)
        return hits

    def enter(
        self, rank: int, request: Request, hit: PrefixHit, num_new_tokens: int, max_chunk: int
    ) -> BlockIds | None:
        """PagedCache.admit of that rank; the request belongs to it when it finds room."""
        block_ids = self.caches[rank].admit(request, hit, num_new_tokens, max_chunk)
        if block_ids is not None:
            request.rank = rank
            self.num_running[rank] += 1
        return block_ids

    def allocate(self, request: Request, num_new_tokens: int) -> BlockIds | None:
        """PagedCache.allocate of its rank."""
        return self.caches[request.rank].allocate(request, num_new_tokens)

    def leave(self, request: Request) -> None:
        self.caches[request.rank].free(request)
        self.num_running[request.rank] -= 1

    def has_table(self, request: Request) -> bool:
        """Whether it runs."""
        return self.caches[request.rank].has_table(request.request_id)

    def pop_last(self, running: list[Request], rank: int) -> Request:
        """Takes the last one of a rank, which has one, out of the list."""
        return running.pop(next(i for i in range(len(running) - 1, -1, -1) if running[i].rank == rank))

    def have_room_to_grow(self, growth: Growth) -> bool:
        """Whether allocate would serve them all, whatever it can take back."""
        if len(self.caches) == 1:
            return self.caches[0].has_room_to_grow(growth)
        return all(
            cache.has_room_to_grow([pair for pair in growth if pair[0].rank == rank])
            for rank, cache in enumerate(self.caches)
        )

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raises RuntimeError when the books do not agree, or blocks are lost while nothing runs."""
        for rank, cache in enumerate(self.caches):
            cache.check_integrity()
            own = [request for request in running if request.rank == rank]
            if not cache.num_tables == len(own) == self.num_running[rank] <= self.max_num_seqs:
                raise RuntimeError(f"rank {rank} has {cache.num_tables} tables and {len(own)} running requests")
            if not all(map(self.has_table, own)):
                raise RuntimeError("the block tables are not those of the running requests")
            if not own and cache.stats.num_free != cache.num_usable_blocks:
                raise RuntimeError(f"blocks are lost: {cache.stats}")
