"""What the TPU kernel is compiled for: its tiles, chosen so that they fit fast memory and keep the MXU busy."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from noria.ops.ragged_paged_attention.tpu_lines import LANES, Lines

_CHUNK = 512  # tokens of the KV sequence that are fetched and used together
_ROWS = 1024  # query rows per KV head of a tile: so many multiplications per byte that the MXU, not HBM, is the limit
_BLOCK_ROWS = 256  # of a block: as many as a block of keys is wide in the MXU, so that loading it does not cost more
_SHORT = 16  # tokens that are one small block, as those of a draft that is verified; fewer where heads are many
_KV_BYTES = 8 << 20  # of fast memory, for pages in use and pages under way
_QUERY_BYTES = 24 << 20  # for the queries, their state and their results
VMEM_LIMIT = 56 << 20  # of 64 MiB on tpu7x and 128 MiB on the others; what is over is for the compiler


@dataclass(frozen=True)
class Sizes:
    """Tile: queries of a row that are worked on together; it reads the row's pages in chunks. Its rows are its tokens
    times the query heads of a lane head, worked on in blocks."""

    lines: Lines
    group: int  # query heads of a KV head
    block_size: int
    dtype: str  # of queries and results
    tile: int  # tokens
    blocks: tuple[int, ...]  # tokens of a tile whose scores are computed together: of short tiles, of all others
    pages: int  # of a chunk

    @property
    def heads(self) -> int:
        """Query heads of a lane head."""
        return self.lines.side * self.group

    @property
    def chunk(self) -> int:
        """Tokens."""
        return self.pages * self.block_size

    def block_of(self, tokens: int) -> int:
        """For a tile of so many tokens, more than one."""
        return next((block for block in self.blocks if tokens <= block), self.blocks[-1])

    @property
    def scratch_bytes(self) -> int:
        lines, size = self.lines, jnp.dtype(self.dtype).itemsize
        chunk = 2 * lines.lines * LANES * 4 + lines.planes * lines.heads_in_line * lines.width * size
        return self.chunk * chunk + self.tile * _token_bytes(lines, self.heads, size)

    @staticmethod
    def choose(lines: Lines, group: int, block_size: int, dtype: str, num_tokens: int, table_width: int) -> Sizes:
        """num_tokens: of the batch. table_width: blocks of the longest sequence."""
        heads, size = lines.side * group, jnp.dtype(dtype).itemsize
        longest = power_below(2 * table_width * block_size - 1)
        chunk = max(LANES, min(_CHUNK, power_below(_KV_BYTES // (8 * LANES * lines.lines)), longest))
        short = max(2, min(_SHORT, power_below(_ROWS // heads)))
        block = max(short, power_below(_BLOCK_ROWS // heads))
        tile = power_below(max(block, _ROWS // heads))
        while tile > short and tile * _token_bytes(lines, heads, size) > _QUERY_BYTES:
            tile //= 2
        tile = max(short, min(tile, power_below(2 * num_tokens - 1)))
        blocks = tuple(sorted({short, min(block, tile)}))
        return Sizes(lines, group, block_size, dtype, tile, blocks, max(1, chunk // block_size))


def _token_bytes(lines: Lines, heads: int, itemsize: int) -> int:
    """Queries and results twice, queries by head, accumulator, and the largest score and sum of each row."""
    rows = lines.heads * heads
    return rows * (lines.width * (5 * itemsize + 4) + 2 * LANES * 4)


def power_below(count: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << max(1, count).bit_length() - 1
