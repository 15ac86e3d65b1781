"""What the TPU kernel works on: its references, and what it works on at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Refs(NamedTuple):
    """starts [R + 1], lens [R], pages [T], where each new token goes, and place (rows, group, offset, window) are
    scalars; those down to scale are in HBM."""

    starts: Any
    lens: Any
    pages: Any
    place: Any
    new: Any  # [T, lines, 128] int32: keys and values of the step
    table: Any  # [G, R, B / 128, 128] int32
    q: Any  # [T, heads, query heads, width]
    out: Any  # as q, and the same memory
    cache: Any  # [rows, block_size, lines, 128] int32
    q_buf: Any  # [2, tile, heads, query heads, width]
    out_buf: Any
    kv_buf: Any  # [2, chunk, lines, 128] int32
    folded: Any  # [heads, tile * query heads, width]: queries of a tile by head
    kv: Any  # [planes, heads in a line, chunk, width]: keys and values in the dtype of the queries
    top: Any  # [heads, tile * query heads, 128] float32: largest score, the same in all lanes
    total: Any  # likewise: sum of weights
    acc: Any  # [heads, tile * query heads, width] float32
    table_buf: Any  # [2, B / 128, 128]: of the rows with even and with odd numbers
    pending: Any  # [2]: tokens of the results under way from each buffer
    q_sem: Any
    out_sem: Any
    kv_sem: Any
    table_sem: Any
    new_sem: Any
    new_scale_sem: Any
    # For int8:
    new_scale: Any = None  # [T, 1, 128]: see tpu._scale_lines
    scale: Any = None  # [rows, 1, scale lines, 128]
    scale_buf: Any = None  # [2, pages, scale lines, 128]
    scales: Any = None  # [chunk / 128, tokens of a page, scale width, 128]: each over the chunk's tokens


# What the kernel is given, in order.
_SCALARS = ("starts", "lens", "pages", "place")
_BUFFERS = ("q_buf", "out_buf", "kv_buf")
_SCRATCH = ("folded", "kv", "top", "total", "acc", "table_buf", "pending", "q_sem", "out_sem", "kv_sem", "table_sem")
_SEMAPHORES = ("new_sem", "new_scale_sem")
HAS_NONE = (*_SCALARS, "new", "table", "q", "out", "cache", *_BUFFERS, *_SCRATCH, *_SEMAPHORES)
HAS_SCALES = (
    *(*_SCALARS, "new", "new_scale", "table", "q", "out", "cache", "scale"),
    *(*_BUFFERS, "scale_buf", "scales", *_SCRATCH, *_SEMAPHORES),
)


class Span(NamedTuple):
    """A tile of a row: `count` tokens from `token` of the batch, the first at position `first` of its sequence."""

    row: jax.Array
    token: jax.Array
    first: jax.Array
    count: jax.Array
    first_page: jax.Array  # that any of its tokens sees
    num_pages: jax.Array
    chunks: jax.Array
    tiles: jax.Array  # of the row


class Rows(NamedTuple):
    """A block of a tile: its tokens, its rows in the matrices of a head, and its first token."""

    tokens: Any
    rows: Any
    first: Any
