"""What the TPU kernel copies between HBM and fast memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from noria.ops.ragged_paged_attention.tpu_lines import LANES
from noria.ops.ragged_paged_attention.tpu_refs import Refs, Span
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes, power_below


@dataclass(frozen=True)
class Copies:
    """slot: of two buffers of pages; side: of two of queries and results. act: starts a copy, or waits for it."""

    sizes: Sizes

    def span(self, refs: Refs, row: Any, tile: Any) -> Span:
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

    def write_new(self, refs: Refs, rows: Any) -> None:
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
            most = min(size, refs.new.shape[0])
            pieces(count, most, lambda offset, part: copy(token + offset, where, slot + offset, part))
            if refs.scale is not None:
                self._write_scales(refs, token, where, slot, count)

        def write_row(row: Any, written: Any) -> Any:
            start, end = refs.starts[row], refs.lens[row]
            count = jnp.where(end > 0, refs.starts[row + 1] - start, 0)  # a row that has ended writes nothing
            first = end - count
            begin, stop = lax.div(first, size), lax.div(end + size - 1, size)
            stop = jnp.where(count > 0, stop, begin)
            lax.fori_loop(begin, stop, lambda page, _: write_page(start, first, end, page), None)
            lines = lax.div(end - 1, self._together) - lax.div(first, self._together) + 1
            return written[0] + count, written[1] + jnp.where(count > 0, lines, 0)

        def wait(count: int) -> None:
            pltpu.make_async_copy(refs.new.at[pl.ds(0, count)], refs.cache.at[0, pl.ds(0, count)], refs.new_sem).wait()

        written, lines = lax.fori_loop(0, rows, write_row, (jnp.int32(0), jnp.int32(0)))
        batch = min(size, refs.new.shape[0])
        lax.fori_loop(0, lax.div(written, batch), lambda *_: wait(batch), None)
        lax.fori_loop(0, lax.rem(written, batch), lambda *_: wait(1), None)
        if refs.scale is not None:
            lax.fori_loop(0, lines, lambda *_: self._scale_copy(refs, 0, 0, 0).wait(), None)

    @property
    def _together(self) -> int:
        return self.sizes.lines.scale_tokens(self.sizes.block_size)

    def _scale_copy(self, refs: Refs, token: Any, page: Any, line: Any) -> Any:
        target = refs.scale.at[page, 0, pl.ds(line, 1)]
        return pltpu.make_async_copy(refs.new_scale.at[token], target, refs.new_scale_sem)

    def _write_scales(self, refs: Refs, token: Any, page: Any, slot: Any, count: Any) -> None:
        """Every line that has one of the tokens, from the last token that it has: any of them has the line."""

        def one(line: Any, _: None) -> None:
            last = jnp.minimum((line + 1) * self._together - slot, count) - 1
            self._scale_copy(refs, token + last, page, line).start()

        lax.fori_loop(lax.div(slot, self._together), lax.div(slot + count - 1, self._together) + 1, one, None)

    def table(self, refs: Refs, row: Any, act: Callable[[Any], None]) -> None:
        """act on the copies of the lines of a row's block table that its tiles need."""
        size = self.sizes.block_size
        end = lax.div(refs.lens[row] + size - 1, size)
        first = self.span(refs, row, 0).first_page

        def one(line: Any, _: None) -> None:
            source = refs.table.at[refs.place[1], row, line]
            act(pltpu.make_async_copy(source, refs.table_buf.at[row & 1, line], refs.table_sem.at[row & 1]))

        lax.fori_loop(lax.div(first, LANES), lax.div(end + LANES - 1, LANES), one, None)

    def next_table(self, refs: Refs, row: Any) -> None:
        """Waits for the row's table, and starts the one after, where the one before was: all its pages are fetched."""
        self.table(refs, row, lambda copy: copy.wait())
        pl.when(row + 1 < refs.place[0])(lambda: self.table(refs, row + 1, lambda copy: copy.start()))

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

    def fetch(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
        start = lambda copy: copy.start()
        pl.when(chunk == 0)(lambda: self._queries(refs, span, side, start))
        self._pages(refs, span, chunk, slot, start, with_table=True)

    def wait(self, refs: Refs, span: Span, chunk: Any, slot: Any, side: Any) -> None:
        wait = lambda copy: copy.wait()
        pl.when(chunk == 0)(lambda: self._queries(refs, span, side, wait))
        self._pages(refs, span, chunk, slot, wait, with_table=False)

    def _results(self, refs: Refs, token: Any, count: Any, side: Any, act: Callable[[Any], None]) -> None:
        def one(offset: Any, size: int) -> None:
            target = refs.out.at[pl.ds(token + offset, size)]
            act(pltpu.make_async_copy(refs.out_buf.at[side, pl.ds(offset, size)], target, refs.out_sem.at[side]))

        pieces(count, min(self.sizes.tile, refs.q.shape[0]), one)

    def send(self, refs: Refs, span: Span, side: Any) -> None:
        self._results(refs, span.token, span.count, side, lambda copy: copy.start())
        refs.pending[side] = span.count

    def drain(self, refs: Refs, side: Any) -> None:
        count = refs.pending[side]
        self._results(refs, 0, count, side, lambda copy: copy.wait())
        refs.pending[side] = 0


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
