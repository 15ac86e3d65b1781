"""What the TPU kernel copies and multiplies for a batch, counted from its tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import jax.numpy as jnp

from noria.ops.ragged_paged_attention.tpu_lines import LANES
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes
from noria.ops.ragged_paged_attention.types import FULL_ATTENTION

SUBLANES = 8
_LINE = 4 * LANES  # bytes


@dataclass(frozen=True)
class Count:
    """Bytes between HBM and fast memory, and what the MXU does: `weights` are the blocks of 128 by 128 that it is
    loaded with, `passes` the times that 8 rows go through one."""

    cache_read: int = 0
    cache_written: int = 0  # read as new keys and values, too
    queries: int = 0
    results: int = 0
    tables: int = 0
    weights: int = 0
    passes: int = 0
    exponentials: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Count)))

    @property
    def bytes(self) -> int:
        return self.cache_read + 2 * self.cache_written + self.queries + self.results + self.tables

    @property
    def flops(self) -> int:
        return 2 * self.passes * SUBLANES * LANES * LANES


def count(sizes: Sizes, rows: Iterable[tuple[int, int]], window: int = FULL_ATTENTION) -> Count:
    """rows: of each, tokens in the cache before, and tokens computed now."""
    total = Count()
    for computed, tokens in rows:
        for done in range(0, tokens, sizes.tile):
            total += _tile(sizes, computed + done, min(sizes.tile, tokens - done), window)
        first = max(0, computed - window + 1) // sizes.block_size
        last = -(-(computed + tokens) // sizes.block_size)
        lines = -(-last // LANES) - first // LANES
        written = tokens * sizes.lines.lines
        if sizes.lines.dtype == "int8":
            together = sizes.lines.scale_tokens(sizes.block_size)
            written += (computed + tokens - 1) // together - computed // together + 1
        total += Count(cache_written=written * _LINE, tables=lines * _LINE)
    return total


def _tile(sizes: Sizes, first: int, tokens: int, window: int) -> Count:
    lines = sizes.lines
    begin = max(0, first - window + 1) // sizes.block_size
    pages = -(-(first + tokens) // sizes.block_size) - begin
    rows = lines.heads * sizes.heads
    size = tokens * rows * lines.width * jnp.dtype(sizes.dtype).itemsize
    total = Count(cache_read=pages * lines.bytes_per_block(sizes.block_size), queries=size, results=size)
    for start in range(begin * sizes.block_size, (begin + pages) * sizes.block_size, sizes.chunk):
        if tokens == 1:
            total += _product(sizes, sizes.heads)
            continue
        size = sizes.block_of(tokens)
        for block in range(0, tokens, size):
            low, high = first + block, first + min(block + size, tokens) - 1
            if start <= high and start + sizes.chunk + window > low + 1:
                total += _product(sizes, size * sizes.heads)
    return total


def _product(sizes: Sizes, rows: int) -> Count:
    """Scores of the rows of every lane head with a chunk, and the weighted sum."""
    heads = sizes.lines.heads
    weights = 2 * heads * (sizes.chunk // LANES) * sizes.lines.pieces
    return Count(weights=weights, passes=weights * -(-rows // SUBLANES), exponentials=heads * rows * sizes.chunk)


def largest(sizes: Sizes, num_tokens: int, num_rows: int, table_width: int) -> Count:
    """Of a full batch, at the longest: as many rows that decode as there are tokens, at the end of their block tables;
    with more tokens than rows, prompts."""
    longest = table_width * sizes.block_size
    if num_tokens <= num_rows:
        return _times(count(sizes, [(longest - 1, 1)]), num_tokens)
    rest = num_tokens % longest
    prompts = _times(count(sizes, [(0, longest)]), num_tokens // longest) if num_tokens >= longest else Count()
    return prompts + (count(sizes, [(0, rest)]) if rest else Count())


def _times(one: Count, times: int) -> Count:
    return Count(*(times * getattr(one, field.name) for field in fields(Count)))
