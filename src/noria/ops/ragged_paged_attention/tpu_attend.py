"""What the TPU kernel computes with a chunk of pages.

Scores, their running maximum and sum, and the accumulator are those of FlashAttention (Dao et al. 2022; the online
softmax is Milakov & Gimelshein's, 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from noria.ops.ragged_paged_attention.tpu_lines import LANES
from noria.ops.ragged_paged_attention.tpu_refs import Refs, Rows, Span
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes
from noria.ops.ragged_paged_attention.types import CACHE_DTYPES

MASKED = -1e30  # finite, so that differences of two masked scores are not NaN
_LARGEST = 3e38  # of a scale; what nobody wrote may be larger, or NaN


@dataclass(frozen=True)
class Attend:
    sizes: Sizes
    scale: float
    soft_cap: float | None
    interpret: bool

    def one_token(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
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

    def many_tokens(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any, size: int) -> None:
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
                for plane, values in enumerate((k, v)[: s.lines.planes]):
                    refs.kv[plane, within] = values
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
            k, v = (refs.kv[plane, within] for plane in (0, s.lines.planes - 1))
            state = self._attend(refs.folded[at], k, v, seen, scales, old)
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
            own = values[head * lines.values_of_head :][: lines.planes * lines.pieces]
            planes = [side_by_side(own[plane :: lines.planes]) for plane in range(lines.planes)]
            joined.append((planes[0], planes[-1]))
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

    def spread_scales(self, refs: Refs, slot: Any) -> None:
        """From [pages, line] to a row for each lane, over the chunk's tokens: by a product with zeros and ones, since
        nothing else moves values from lanes to rows as fast."""
        s = self.sizes
        shape = (s.pages, s.chunk)
        token = self._token_of(lax.broadcasted_iota(jnp.int32, shape, 1))
        of_page = lax.div(token, s.block_size) == lax.broadcasted_iota(jnp.int32, shape, 0)
        columns, tokens, width, _ = refs.scales.shape
        for line in range(refs.scale_buf.shape[2]):
            scale = self._line(refs.scale_buf, slot, line)
            scale = jnp.where(jnp.abs(scale) < _LARGEST, scale, 0)
            spread = lax.dot_general(
                *(scale, of_page.astype(jnp.float32), (((0,), (0,)), ((), ())), lax.Precision.HIGHEST),
                preferred_element_type=jnp.float32,
            )
            for column in range(columns):
                part = spread[:, column * LANES : (column + 1) * LANES]
                if self.interpret:  # see _line
                    here = LANES // width
                    refs.scales[column, pl.ds(line * here, here)] = part.reshape(here, width, LANES)
                else:
                    flat = refs.scales.at[column].reshape(tokens * width, LANES)
                    flat[pl.ds(line * LANES, LANES), :] = part

    def _row_scales(self, refs: Refs, head: Any, rows: int) -> tuple[jax.Array, jax.Array] | None:
        """Scales of the keys and of the values of a lane head's query rows: [1 or rows, chunk] each."""
        if refs.scale is None:
            return None
        s = self.sizes
        shape = (refs.scales.shape[1], s.chunk)
        token = self._token_of(lax.broadcasted_iota(jnp.int32, shape, 1)) & (s.block_size - 1)
        own = token == lax.broadcasted_iota(jnp.int32, shape, 0)
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        part = divide(row - divide(row, s.heads) * s.heads, s.group)
        found = []
        for which in range(s.lines.planes):
            scales = None
            for side in range(s.lines.side):
                word = (head * s.lines.side + side) * s.lines.planes + which
                columns = [self._line(refs.scales, column, word) for column in range(refs.scales.shape[0])]
                picked = jnp.sum(jnp.where(own, side_by_side(columns), 0), axis=0, keepdims=True)
                scales = picked if scales is None else jnp.where(part == side, picked, scales)
            found.append(scales)
        return found[0], found[-1]


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
