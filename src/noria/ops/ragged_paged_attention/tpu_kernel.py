"""The body of the TPU kernel. One program walks through all rows, their tiles and the chunks of pages that each sees.

While a chunk is computed with, the next one is under way: of the same tile, or the first of the next. Scores, their
running maximum and sum, and the accumulator are those of FlashAttention (Dao et al. 2022; the online softmax is Milakov
& Gimelshein's, 2018). What the walk is from is ragged paged attention as TPUs' serving kernels do it (Jiang et al.
2025, "Ragged Paged Attention: A High-Performance and Flexible LLM Inference Kernel for TPU").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from noria.ops.ragged_paged_attention.tpu_lines import LANES
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes, power_below
from noria.ops.ragged_paged_attention.types import CACHE_DTYPES

MASKED = -1e30  # finite, so that differences of two masked scores are not NaN
_LARGEST = 3e38  # of a scale; what nobody wrote may be larger, or NaN


class Refs(NamedTuple):
    """starts [R + 1], lens [R], pages [T], where each new token goes, and place (rows, group, offset, window) are
    scalars; the next are in HBM."""

    starts: Any
    lens: Any
    pages: Any
    place: Any
    q: Any  # [T, heads, query heads, width]
    new: Any  # [T, lines, 128] int32: keys and values of the step
    table: Any  # [G, R, B / 128, 128] int32
    scale: Any  # [rows, 1, scale lines, 128], or None
    out: Any  # as q, and the same memory
    cache: Any  # [rows, block_size, lines, 128] int32
    q_buf: Any  # [2, tile, heads, query heads, width]
    out_buf: Any
    kv_buf: Any  # [2, chunk, lines, 128] int32
    scale_buf: Any  # [2, pages, scale lines, 128]
    scales: Any  # [scale lines * 128, chunk]: each of them, over the chunk's tokens
    folded: Any  # [heads, tile * query heads, width]: queries of a tile by head
    kv: Any  # [2, heads in a line, chunk, width]: keys and values in the dtype of the queries
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


@dataclass(frozen=True)
class Kernel:
    """What is fixed when it is compiled."""

    sizes: Sizes
    scale: float
    soft_cap: float | None
    interpret: bool

    def __call__(self, refs: Refs) -> None:
        refs.pending[0] = 0
        refs.pending[1] = 0
        rows = refs.place[0]
        zero = jnp.int32(0)

        @pl.when(rows > 0)
        def _() -> None:
            self._table(refs, zero, lambda copy: copy.start())
            self._write_new(refs, rows)
            self._next_table(refs, zero)
            self._fetch(refs, self._span(refs, zero, zero), zero, 0, 0)

        lax.while_loop(lambda state: state[0] < rows, lambda state: self._step(refs, *state), (zero,) * 5)
        for slot in range(2):
            self._drain(refs, slot)

    def _step(self, refs: Refs, row: Any, tile: Any, chunk: Any, step: Any, item: Any) -> tuple[Any, ...]:
        """One chunk of one tile. step and item count chunks and tiles; their parity is the buffer."""
        span = self._span(refs, row, tile)
        last = chunk + 1 == span.chunks
        row_ends = last & (tile + 1 == span.tiles)
        next_row = jnp.where(row_ends, row + 1, row)
        next_tile = jnp.where(row_ends, 0, jnp.where(last, tile + 1, tile))
        next_chunk = jnp.where(last, 0, chunk + 1)
        next_item = jnp.where(last, item + 1, item)
        slot, side = step & 1, item & 1

        @pl.when(next_row < refs.place[0])
        def _() -> None:
            pl.when(row_ends)(lambda: self._next_table(refs, next_row))
            self._fetch(refs, self._span(refs, next_row, next_tile), next_chunk, (step + 1) & 1, next_item & 1)

        self._wait(refs, span, chunk, slot, side)
        if refs.scale is not None:
            self._spread_scales(refs, slot)

        @pl.when(last)
        def _() -> None:
            self._drain(refs, side)

        @pl.when(span.count == 1)
        def _() -> None:
            self._one_token(refs, span, chunk, slot, side)

        least = 1
        for block in self.sizes.blocks:
            is_last = block == self.sizes.blocks[-1]
            fits = (span.count > least) if is_last else (span.count > least) & (span.count <= block)
            pl.when(fits)(lambda block=block: self._many_tokens(refs, span, chunk, slot, side, block))
            least = block

        @pl.when(last)
        def _() -> None:
            self._send(refs, span, side)

        return next_row, next_tile, next_chunk, step + 1, next_item

    def _span(self, refs: Refs, row: Any, tile: Any) -> Span:
        s = self.sizes
        start = refs.starts[row]
        length = refs.starts[row + 1] - start
        done = tile * s.tile
        first = refs.lens[row] - length + done
        count = jnp.minimum(length - done, s.tile)
        first_page = lax.div(jnp.maximum(first - refs.place[3] + 1, 0), s.block_size)
        num_pages = lax.div(first + count + s.block_size - 1, s.block_size) - first_page
        chunks = jnp.maximum(1, lax.div(num_pages + s.pages - 1, s.pages))
        tiles = lax.div(length + s.tile - 1, s.tile)
        return Span(row, start + done, first, count, first_page, num_pages, chunks, tiles)

    # What is copied.

    def _write_new(self, refs: Refs, rows: Any) -> None:
        """New keys and values to their places, and waits for them: rows may read each other's pages."""
        size = self.sizes.block_size

        def copy(token: Any, page: Any, slot: Any, count: int) -> None:
            source = refs.new.at[pl.ds(token, count)]
            pltpu.make_async_copy(source, refs.cache.at[page, pl.ds(slot, count)], refs.new_sem).start()

        def write_page(start: Any, first: Any, end: Any, page: Any) -> None:
            low = jnp.maximum(first, page * size)
            count = jnp.minimum(end, (page + 1) * size) - low
            token, slot = start + low - first, low - page * size
            where = refs.pages[token]
            pieces(
                count,
                min(size, refs.new.shape[0]),
                lambda offset, part: copy(token + offset, where, slot + offset, part),
            )

        def write_row(row: Any, written: Any) -> Any:
            start, end = refs.starts[row], refs.lens[row]
            count = jnp.where(end > 0, refs.starts[row + 1] - start, 0)  # a row that has ended writes nothing
            first = end - count
            begin, stop = lax.div(first, size), lax.div(end + size - 1, size)
            stop = jnp.where(count > 0, stop, begin)
            lax.fori_loop(begin, stop, lambda page, _: write_page(start, first, end, page), None)
            return written + count

        def wait(count: int) -> None:
            pltpu.make_async_copy(refs.new.at[pl.ds(0, count)], refs.cache.at[0, pl.ds(0, count)], refs.new_sem).wait()

        written = lax.fori_loop(0, rows, write_row, jnp.int32(0))
        batch = min(size, refs.new.shape[0])
        lax.fori_loop(0, lax.div(written, batch), lambda *_: wait(batch), None)
        lax.fori_loop(0, lax.rem(written, batch), lambda *_: wait(1), None)

    def _table(self, refs: Refs, row: Any, act: Callable[[Any], None]) -> None:
        """act on the copies of the lines of a row's block table that its tiles need."""
        size = self.sizes.block_size
        end = lax.div(refs.lens[row] + size - 1, size)
        first = self._span(refs, row, 0).first_page

        def one(line: Any, _: None) -> None:
            source = refs.table.at[refs.place[1], row, line]
            act(pltpu.make_async_copy(source, refs.table_buf.at[row & 1, line], refs.table_sem.at[row & 1]))

        lax.fori_loop(lax.div(first, LANES), lax.div(end + LANES - 1, LANES), one, None)

    def _next_table(self, refs: Refs, row: Any) -> None:
        """Waits for the row's table, and starts the one after, where the one before was: all its pages are fetched."""
        self._table(refs, row, lambda copy: copy.wait())
        pl.when(row + 1 < refs.place[0])(lambda: self._table(refs, row + 1, lambda copy: copy.start()))

    def _pages(
        self, refs: Refs, span: Span, chunk: Any, slot: Any, act: Callable[[Any], None], with_table: bool
    ) -> None:
        """act on the copy of every page of a chunk."""
        s = self.sizes
        begin = span.first_page + chunk * s.pages
        count = jnp.minimum(span.num_pages - chunk * s.pages, s.pages)

        def one(index: Any, _: None) -> None:
            number = begin + index
            page = refs.place[2]  # whatever page, where the copy is only waited for
            if with_table:
                page += refs.table_buf[span.row & 1, lax.div(number, LANES), lax.rem(number, LANES)]
            target = refs.kv_buf.at[slot, pl.ds(index * s.block_size, s.block_size)]
            act(pltpu.make_async_copy(refs.cache.at[page], target, refs.kv_sem.at[slot]))
            if refs.scale is not None:
                target = refs.scale_buf.at[slot, index]
                act(pltpu.make_async_copy(refs.scale.at[page, 0], target, refs.kv_sem.at[slot]))

        lax.fori_loop(0, count, one, None)

    def _queries(self, refs: Refs, span: Span, side: Any, act: Callable[[Any], None]) -> None:
        def one(offset: Any, size: int) -> None:
            source = refs.q.at[pl.ds(span.token + offset, size)]
            act(pltpu.make_async_copy(source, refs.q_buf.at[side, pl.ds(offset, size)], refs.q_sem.at[side]))

        pieces(span.count, min(self.sizes.tile, refs.q.shape[0]), one)

    def _fetch(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
        start = lambda copy: copy.start()
        pl.when(chunk == 0)(lambda: self._queries(refs, span, side, start))
        self._pages(refs, span, chunk, slot, start, with_table=True)

    def _wait(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
        wait = lambda copy: copy.wait()
        pl.when(chunk == 0)(lambda: self._queries(refs, span, side, wait))
        self._pages(refs, span, chunk, slot, wait, with_table=False)

    def _results(self, refs: Refs, token: Any, count: Any, side: Any, act: Callable[[Any], None]) -> None:
        def one(offset: Any, size: int) -> None:
            target = refs.out.at[pl.ds(token + offset, size)]
            act(pltpu.make_async_copy(refs.out_buf.at[side, pl.ds(offset, size)], target, refs.out_sem.at[side]))

        pieces(count, min(self.sizes.tile, refs.q.shape[0]), one)

    def _send(self, refs: Refs, span: Span, side: Any) -> None:
        self._results(refs, span.token, span.count, side, lambda copy: copy.start())
        refs.pending[side] = span.count

    def _drain(self, refs: Refs, side: Any) -> None:
        count = refs.pending[side]
        self._results(refs, 0, count, side, lambda copy: copy.wait())
        refs.pending[side] = 0

    # What is computed.

    def _one_token(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
        """The query heads of a KV head are the rows of one product."""
        s = self.sizes
        heads = s.heads
        start = (span.first_page + chunk * s.pages) * s.block_size
        age = span.first - start - self._token_of(lax.broadcasted_iota(jnp.int32, (heads, s.chunk), 1))
        seen = (age >= 0) & (age < refs.place[3])
        begin, end = chunk == 0, chunk + 1 == span.chunks

        def group(index: Any, _: None) -> None:
            for within, (k, v) in enumerate(self._keys_and_values(refs, index, slot, span.first + 1 - start)):
                head = index * s.lines.heads_in_line + within
                at = (head, pl.ds(0, heads))
                old = (
                    jnp.where(begin, MASKED, refs.top[at]),
                    jnp.where(begin, 0.0, refs.total[at]),
                    jnp.where(begin, 0.0, refs.acc[at]),
                )
                scales = self._row_scales(refs, head, heads)
                top, total, acc = self._attend(refs.q_buf[side, 0, head], k, v, seen, scales, old)
                refs.top[at], refs.total[at], refs.acc[at] = top, total, acc

                @pl.when(end)
                def _(head: Any = head, total: Any = total, acc: Any = acc) -> None:
                    refs.out_buf[side, 0, head] = (acc / across(total, acc.shape[1])).astype(refs.out_buf.dtype)

        lax.fori_loop(0, s.lines.heads // s.lines.heads_in_line, group, None)

    def _many_tokens(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any, size: int) -> None:
        """In blocks of `size` tokens."""
        s = self.sizes
        blocks = lax.div(span.count + size - 1, size)
        start = (span.first_page + chunk * s.pages) * s.block_size

        @pl.when(chunk == 0)
        def _() -> None:
            self._each_block(blocks, lambda head, block: self._begin(refs, head, self._rows(block, size), side))

        def group(index: Any, _: None) -> None:
            valid = span.first + span.count - start
            for within, (k, v) in enumerate(self._keys_and_values(refs, index, slot, valid)):
                refs.kv[0, within], refs.kv[1, within] = k, v
            for within in range(s.lines.heads_in_line):
                head = index * s.lines.heads_in_line + within
                scales = self._row_scales(refs, head, size * s.heads)
                work = lambda block, _, head=head, within=within, scales=scales: self._block(
                    refs, span, start, head, within, self._rows(block, size), scales
                )
                lax.fori_loop(0, blocks, work, None)

        lax.fori_loop(0, s.lines.heads // s.lines.heads_in_line, group, None)

        @pl.when(chunk + 1 == span.chunks)
        def _() -> None:
            self._each_block(blocks, lambda head, block: self._end(refs, head, self._rows(block, size), side))

    def _each_block(self, blocks: Any, work: Callable[[Any, Any], None]) -> None:
        def head(index: Any, _: None) -> None:
            lax.fori_loop(0, blocks, lambda block, _: work(index, block), None)

        lax.fori_loop(0, self.sizes.lines.heads, head, None)

    def _rows(self, block: Any, size: int) -> Rows:
        rows = size * self.sizes.heads
        return Rows(pl.ds(block * size, size), pl.ds(pl.multiple_of(block * rows, rows), rows), block * size)

    def _begin(self, refs: Refs, head: Any, rows: Rows, side: Any) -> None:
        """The queries of a block as one matrix, and the state before any key."""
        at, count = (head, rows.rows), rows.rows.size
        q = refs.q_buf[side, rows.tokens, head].astype(jnp.float32)
        refs.folded[at] = q.reshape(count, -1).astype(refs.folded.dtype)
        refs.top[at] = jnp.full((count, LANES), MASKED, jnp.float32)
        refs.total[at] = jnp.zeros((count, LANES), jnp.float32)
        refs.acc[at] = jnp.zeros((count, refs.acc.shape[2]), jnp.float32)

    def _end(self, refs: Refs, head: Any, rows: Rows, side: Any) -> None:
        acc = refs.acc[head, rows.rows]
        result = acc / across(refs.total[head, rows.rows], acc.shape[1])
        result = result.reshape(rows.tokens.size, self.sizes.heads, -1).astype(refs.out_buf.dtype)
        refs.out_buf[side, rows.tokens, head] = result

    def _block(self, refs: Refs, span: Span, start: Any, head: Any, within: int, rows: Rows, scales: Any) -> None:
        """A block's scores with a chunk, unless none of its tokens sees any of it."""
        s, window = self.sizes, refs.place[3]
        first = span.first + rows.first
        last = jnp.minimum(first + rows.tokens.size, span.first + span.count) - 1

        @pl.when((start <= last) & (start + s.chunk + window > first + 1))
        def _() -> None:
            at, shape = (head, rows.rows), (rows.rows.size, s.chunk)
            token = divide(lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0), s.heads)
            age = first - start + token - self._token_of(lax.broadcasted_iota(jnp.int32, shape, 1))
            seen = (age >= 0) & (age < window)
            old = refs.top[at], refs.total[at], refs.acc[at]
            state = self._attend(refs.folded[at], refs.kv[0, within], refs.kv[1, within], seen, scales, old)
            refs.top[at], refs.total[at], refs.acc[at] = state

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scales: Any, old: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """q [rows, width]; k, v [chunk, width]; seen [rows, chunk]. Largest score, sum and accumulator, moved on."""
        top, total, acc = old
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dot = lambda a, b, axis: lax.dot_general(
            a, b, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32
        )
        scores = dot(q, k, 1) * self.scale
        if scales is not None:
            scores = scores * scales[0]
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        # A row that has seen nothing yet has weights of 1 here, which the first score it sees makes 0.
        weights = jnp.exp(scores - across(new_top, scores.shape[1]))
        fade = jnp.exp(top - new_top)
        total = total * fade + jnp.sum(weights, axis=1, keepdims=True)
        if scales is not None:
            weights = weights * scales[1]
        return new_top, total, acc * across(fade, acc.shape[1]) + dot(weights.astype(v.dtype), v, 0)

    def _keys_and_values(self, refs: Refs, group: Any, slot: Any, valid: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Of the lane heads of one group of lines, [chunk, width] each; tokens from the `valid`-th on are zeros, since
        what nobody wrote may be NaN. Tokens are in the order of _token_of."""
        lines = self.sizes.lines
        values: list[jax.Array] = []
        for index in range(lines.lines_of_head):
            words = self._line(refs.kv_buf, slot, group * lines.lines_of_head + index)
            token = lax.broadcasted_iota(jnp.int32, words.shape, 0)
            values += self._values(jnp.where(token < valid, words, 0), refs.q_buf.dtype)
        joined = []
        for head in range(lines.heads_in_line):
            first = 2 * head * lines.pieces
            both = (values[first + which : first + 2 * lines.pieces : 2] for which in range(2))
            joined.append(tuple(side_by_side(parts) for parts in both))
        return joined

    def _line(self, ref: Any, slot: Any, line: Any) -> jax.Array:
        """One line of every token, or page: [n, 128] of a buffer [2, n, lines, 128]."""
        _, count, lines, _ = ref.shape
        if self.interpret:  # it knows no reshaped references
            return ref[slot, :, line, :]
        return ref.at[slot].reshape(count * lines, LANES)[pl.ds(line, count, stride=lines), :]

    def _values(self, words: jax.Array, dtype: Any) -> list[jax.Array]:
        """The values that share words, each [n, 128]. Registers hold values of neighbouring rows in a word, so that
        words of n / packing tokens that are far apart are put together without moving anything."""
        lines = self.sizes.lines
        kind, parts = CACHE_DTYPES[lines.dtype], lines.packing
        if parts == 1:
            return [lax.bitcast_convert_type(words, kind).astype(dtype)]
        count, width = words.shape[0] // parts, 32 // parts
        rows = [words[part * count : (part + 1) * count] for part in range(parts)]
        values = []
        for place in range(parts):
            packed = jnp.zeros_like(rows[0])
            for part, row in enumerate(rows):
                value = lax.shift_right_logical(row, place * width) & ((1 << width) - 1)
                packed = packed | lax.shift_left(value, part * width)
            values.append(pltpu.bitcast(packed, kind).astype(dtype))
        return values

    def _token_of(self, row: jax.Array) -> jax.Array:
        """Which token of a chunk is in which row of the values."""
        parts = self.sizes.lines.packing
        bits = parts.bit_length() - 1
        return (row & (parts - 1)) * (self.sizes.chunk // parts) + lax.shift_right_logical(row, bits)

    # Scales of int8.

    def _spread_scales(self, refs: Refs, slot: Any) -> None:
        """From [pages, line] to a row for each lane, over the chunk's tokens: by a product with zeros and ones, since
        nothing else moves values from lanes to rows as fast."""
        s = self.sizes
        shape = (s.pages, s.chunk)
        token = self._token_of(lax.broadcasted_iota(jnp.int32, shape, 1))
        of_page = lax.div(token, s.block_size) == lax.broadcasted_iota(jnp.int32, shape, 0)
        for line in range(refs.scale_buf.shape[2]):
            scale = self._line(refs.scale_buf, slot, line)
            scale = jnp.where(jnp.abs(scale) < _LARGEST, scale, 0)
            refs.scales[pl.ds(line * LANES, LANES)] = lax.dot_general(
                *(scale, of_page.astype(jnp.float32), (((0,), (0,)), ((), ())), lax.Precision.HIGHEST),
                preferred_element_type=jnp.float32,
            )

    def _row_scales(self, refs: Refs, head: Any, rows: int) -> tuple[jax.Array, jax.Array] | None:
        """Scales of the keys and of the values of a lane head's query rows: [1 or rows, chunk] each."""
        if refs.scale is None:
            return None
        s = self.sizes
        shape = (s.block_size, s.chunk)
        token = self._token_of(lax.broadcasted_iota(jnp.int32, shape, 1)) & (s.block_size - 1)
        own = token == lax.broadcasted_iota(jnp.int32, shape, 0)
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        part = divide(row - divide(row, s.heads) * s.heads, s.group)
        found = []
        for which in range(2):
            scales = None
            for side in range(s.lines.side):
                lane = pl.multiple_of(((head * s.lines.side + side) * 2 + which) * s.block_size, s.block_size)
                picked = jnp.where(own, refs.scales[pl.ds(lane, s.block_size)], 0)
                picked = jnp.sum(picked, axis=0, keepdims=True)
                scales = picked if scales is None else jnp.where(part == side, picked, scales)
            found.append(scales)
        return found[0], found[1]


def pieces(count: Any, most: int, act: Callable[[Any, int], None]) -> None:
    """act(offset, size) for sizes that are powers of two and add up to count, since copies have fixed sizes."""

    @pl.when(count == 1)
    def _() -> None:
        act(jnp.int32(0), 1)

    @pl.when(count > 1)
    def _() -> None:
        size = power_below(most)
        while size:
            offset = count & ~(2 * size - 1)
            pl.when(count & size != 0)(lambda offset=offset, size=size: act(offset, size))
            size //= 2


def across(columns: jax.Array, width: int) -> jax.Array:
    """[rows, 128], the same in all lanes -> [rows, width]."""
    return side_by_side([columns] * (width // LANES))


def side_by_side(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def divide(numbers: jax.Array, divisor: int) -> jax.Array:
    """Small non-negative int32 by a constant. TPUs have no division of integers in vectors."""
    if divisor == 1:
        return numbers
    return ((numbers.astype(jnp.float32) + 0.5) * (1 / divisor)).astype(jnp.int32)
