"""The paged cache as the scheduler sees it: block tables of requests over the pool and the prefix index.

A full block enters the prefix index (`commit`, called by the scheduler) when the step that computes its last token is
reported or, with run-ahead, when the step after it is planned; not when it is scheduled: no request can find a block
that another one of the same step is still writing. The device runs steps in order, so the next step reads what this one
wrote; for the same reason a block that a step in flight still reads may be given to the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from noria.cache.block_pool import NULL_BLOCK, BlockPool
from noria.cache.layout import BlockIds, CacheLayout, blocks_for_group
from noria.cache.prefix_index import PrefixIndex, extend_hashes
from noria.engine.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache already holds of a request: whole blocks, never its last token."""

    num_tokens: int
    block_ids: BlockIds  # per group num_tokens / block_size ids; 0 where the window has passed


@dataclass(frozen=True, slots=True)
class CacheStats:
    num_blocks: int  # that can be handed out
    num_used: int
    num_free: int
    num_cached: int  # used or free blocks that a prefix can be found in
    prefix_queries: int  # tokens looked up at first admissions
    prefix_hits: int  # of those found

    @property
    def usage(self) -> float:
        return self.num_used / self.num_blocks

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(slots=True)
class _Table:
    """The blocks of one request, in position order; lists of all groups are equally long."""

    blocks: BlockIds
    first_live: list[int]  # per group: entries before it are NULL_BLOCK
    num_committed: int  # leading blocks that were offered to the prefix index


class PagedCache:
    """Block tables of the running requests. Host bookkeeping only: the arrays belong to the runner."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        lookahead: int = 0,
    ) -> None:
        """num_blocks: rows of the device cache per slot, the null block included. lookahead: see extend_hashes; 1 where
        a draft head keeps in the place of a token what it made of that token and the next."""
        self.layout = layout
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.lookahead = lookahead
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(layout, block_size)
        self._tables: dict[str, _Table] = {}
        self._nothing: BlockIds = tuple([] for _ in layout.groups)
        self._sliding = [(g, spec) for g, spec in enumerate(layout.groups) if spec.window is not None]
        self._prefix_queries = 0
        self._prefix_hits = 0

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            num_blocks=self._pool.num_usable,
            num_used=self._pool.num_used,
            num_free=self._pool.num_free,
            num_cached=len(self._index),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def lookup(self, request: Request) -> PrefixHit:
        """The longest prefix of the request that is in the cache. Takes nothing: the hit is good until the next change.

        The last token is never part of it, because computing it is what yields the next token. A request that lacks
        log-probabilities of its prompt finds nothing, because computing the prompt is what yields them.
        """
        if not self.enable_prefix_caching or request.needs_prompt_logprobs:
            return PrefixHit(0, self._nothing)
        hashes = extend_hashes(request, self.block_size, self.lookahead)
        found = self._index.find(hashes[: (request.num_tokens - 1) // self.block_size])
        return PrefixHit(len(found[0]) * self.block_size, found)

    def admit(self, request: Request, hit: PrefixHit, num_new_tokens: int, max_chunk: int) -> BlockIds | None:
        """Opens the table of a request: the blocks of `hit` and new ones for `num_new_tokens` after them.

        Returns the whole table (per group, 0 where the window has passed), or None, and takes nothing, unless all
        tokens that the request has now could find room: half a prompt in the cache is of no use to anybody.
        max_chunk: the most tokens of the request that one step may compute.
        """
        if request.request_id in self._tables:
            raise RuntimeError(f"request {request.request_id} has a block table already")
        if not self.has_room(request, hit, max_chunk):
            return None
        num_hit = hit.num_tokens // self.block_size
        for blocks in hit.block_ids:
            for block in blocks:
                if block != NULL_BLOCK:
                    self._pool.share(block)
        table = _Table(
            blocks=tuple(list(blocks) for blocks in hit.block_ids),
            first_live=[
                min(num_hit, s.first_needed_block(hit.num_tokens, self.block_size)) for s in self.layout.groups
            ],
            num_committed=num_hit,
        )
        self._tables[request.request_id] = table
        self._extend(table, -(-(hit.num_tokens + num_new_tokens) // self.block_size) - num_hit)
        if self.enable_prefix_caching and request.num_preemptions == 0:
            self._prefix_queries += request.num_tokens
            self._prefix_hits += hit.num_tokens
        return self.block_ids(request.request_id)

    def has_room(self, request: Request, hit: PrefixHit, max_chunk: int) -> bool:
        """Whether admit would take the request."""
        return self._blocks_to_take(request.num_tokens, hit, max_chunk) <= self._pool.num_free

    def _blocks_to_take(self, num_tokens: int, hit: PrefixHit, max_chunk: int) -> int:
        """The most free blocks that the request will have taken by the time its `num_tokens` are computed.

        Found blocks in use by others cost nothing, found free ones do. In a sliding group the found blocks are passed
        soon, so they save nothing there.
        """
        count, max_chunk = 0, min(max_chunk, num_tokens - hit.num_tokens)
        for spec, blocks in zip(self.layout.groups, hit.block_ids):
            count += blocks_for_group(spec, num_tokens, self.block_size, max_chunk)
            if spec.window is None:
                count -= sum(not self._pool.is_free(block) for block in blocks)
        return count

    def allocate(self, request: Request, num_new_tokens: int) -> BlockIds | None:
        """Makes room for `num_new_tokens` after the computed ones of a request that has a table.

        Returns the new block ids per group (not to be modified), or None, and takes nothing, when the pool is too
        small. Blocks that left the window go back to the pool first, in either case. They are looked for only when a
        new block is needed: the number of blocks held is the same at its peak, and most steps cost nothing.
        """
        table = self._tables[request.request_id]
        needed = self._missing(table, request.num_computed_tokens + num_new_tokens)
        if needed <= 0:
            return self._nothing
        self._release_passed(table, request.num_computed_tokens)
        if needed * self.layout.num_groups > self._pool.num_free:
            return None
        return self._extend(table, needed)

    def _missing(self, table: _Table, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) - len(table.blocks[0])

    def has_room_to_grow(self, growth: Iterable[tuple[Request, int]]) -> bool:
        """Whether allocate would serve all these pairs of its arguments, whatever it can take back."""
        needed = 0
        for request, num_new_tokens in growth:
            missing = self._missing(self._tables[request.request_id], request.num_computed_tokens + num_new_tokens)
            needed += max(missing, 0)
        return needed * self.layout.num_groups <= self._pool.num_free

    def _extend(self, table: _Table, count: int) -> BlockIds:
        """Appends `count` blocks to every group's list."""
        taken = self._pool.allocate(count * self.layout.num_groups)
        if len(self._index):
            for block in taken:
                self._index.discard(block)
        new = tuple(taken[group * count : (group + 1) * count] for group in range(self.layout.num_groups))
        for blocks, added in zip(table.blocks, new):
            blocks.extend(added)
        return new

    def _release_passed(self, table: _Table, num_computed_tokens: int) -> None:
        for group, spec in self._sliding:
            blocks = table.blocks[group]
            first = min(spec.first_needed_block(num_computed_tokens, self.block_size), len(blocks))
            for i in range(table.first_live[group], first):
                self._release(blocks[i])
                blocks[i] = NULL_BLOCK
            table.first_live[group] = max(first, table.first_live[group])

    def _release(self, block: int) -> None:
        self._pool.release(block, keep_content=block in self._index)

    def commit(self, request: Request) -> None:
        """Enters the blocks that `request.num_computed_tokens` fill into the prefix index (see the top of the file).

        Tokens may be computed before the host knows them all: a block of such tokens has to wait for the next call.
        The token that ended a request is nobody's input: it counts as computed but need not be.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_known = len(request.token_ids) - max(request.is_finished, self.lookahead)
        num_full = min(request.num_computed_tokens, num_known) // self.block_size
        if num_full <= table.num_committed:
            return
        hashes = extend_hashes(request, self.block_size, self.lookahead)
        for i in range(table.num_committed, num_full):
            for group, blocks in enumerate(table.blocks):
                if blocks[i] != NULL_BLOCK:
                    self._index.add(group, hashes[i], blocks[i])
        table.num_committed = num_full

    def free(self, request: Request) -> None:
        """Gives all blocks of the request back. Its last blocks will be reused before its first ones."""
        table = self._tables.pop(request.request_id)
        for row in zip(*map(reversed, table.blocks)):
            for block in row:
                if block != NULL_BLOCK:
                    self._release(block)

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes (after new weights, say). Requests that hold blocks now will not enter the index again,
        since part of their content is from before."""
        self._index.clear()
        for table in self._tables.values():
            table.num_committed = sys.maxsize

    def block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's table: per group the block ids in position order, 0 where the window has passed."""
        return tuple(list(blocks) for blocks in self._tables[request_id].blocks)

    def blocks_held(self, request_id: str) -> list[int]:
        """Per group the number of blocks that the request holds, shared ones included."""
        return [len(blocks) - blocks.count(NULL_BLOCK) for blocks in self._tables[request_id].blocks]

    def check_integrity(self) -> None:
        """Raises RuntimeError when tables, reference counts, free list and prefix index do not agree."""
        references = [0] * self._pool.num_blocks
        group_of: dict[int, int] = {}
        for request_id, table in self._tables.items():
            if len({len(blocks) for blocks in table.blocks}) != 1:
                raise RuntimeError(f"request {request_id} has block lists of different lengths")
            for group, blocks in enumerate(table.blocks):
                live = blocks[table.first_live[group] :]
                if NULL_BLOCK in live or any(blocks[: table.first_live[group]]):
                    raise RuntimeError(f"request {request_id} has lost its place in group {group}: {blocks}")
                for block in live:
                    references[block] += 1
                    if group_of.setdefault(block, group) != group:
                        raise RuntimeError(f"block {block} is used by the groups {group_of[block]} and {group}")
        self._pool.check_integrity(references)
        self._index.check_integrity(group_of)

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    @property
    def num_tables(self) -> int:
        return len(self._tables)
