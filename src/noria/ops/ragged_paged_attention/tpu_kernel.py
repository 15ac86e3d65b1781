"""The body of the TPU kernel. One program walks through all rows, their tiles and the chunks of pages that each sees.

While a chunk is computed with, the next one is under way: of the same tile, or the first of the next. The walk is that
of ragged paged attention in TPUs' serving engines (Jiang et al. 2025, "Ragged Paged Attention: A High-Performance and
Flexible LLM Inference Kernel for TPU").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from noria.ops.ragged_paged_attention.tpu_attend import Attend
from noria.ops.ragged_paged_attention.tpu_copies import Copies
from noria.ops.ragged_paged_attention.tpu_refs import Refs


@dataclass(frozen=True)
class Kernel:
    """What is fixed when it is compiled."""

    copies: Copies
    attend: Attend

    def __call__(self, refs: Refs) -> None:
        refs.pending[0] = 0
        refs.pending[1] = 0
        rows = refs.place[0]
        zero = jnp.int32(0)

        @pl.when(rows > 0)
        def _() -> None:
            self.copies.table(refs, zero, lambda copy: copy.start())
            self.copies.write_new(refs, rows)
            self.copies.next_table(refs, zero)
            self.copies.fetch(refs, self.copies.span(refs, zero, zero), zero, 0, 0)

        lax.while_loop(lambda state: state[0] < rows, lambda state: self._step(refs, *state), (zero,) * 5)
        for slot in range(2):
            self.copies.drain(refs, slot)

    def _step(self, refs: Refs, row: Any, tile: Any, chunk: Any, step: Any, item: Any) -> tuple[Any, ...]:
        """One chunk of one tile. step and item count chunks and tiles; their parity is the buffer."""
        span = self.copies.span(refs, row, tile)
        last = chunk + 1 == span.chunks
        row_ends = last & (tile + 1 == span.tiles)
        next_row = jnp.where(row_ends, row + 1, row)
        next_tile = jnp.where(row_ends, 0, jnp.where(last, tile + 1, tile))
        next_chunk = jnp.where(last, 0, chunk + 1)
        next_item = jnp.where(last, item + 1, item)
        slot, side = step & 1, item & 1

        @pl.when(next_row < refs.place[0])
        def _() -> None:
            pl.when(row_ends)(lambda: self.copies.next_table(refs, next_row))
            upcoming = self.copies.span(refs, next_row, next_tile)
            self.copies.fetch(refs, upcoming, next_chunk, (step + 1) & 1, next_item & 1)

        self.copies.wait(refs, span, chunk, slot, side)
        if refs.scale is not None:
            self.attend.spread_scales(refs, slot)

        @pl.when(last)
        def _() -> None:
            self.copies.drain(refs, side)

        @pl.when(span.count == 1)
        def _() -> None:
            self.attend.one_token(refs, span, chunk, slot, side)

        least = 1
        for block in self.copies.sizes.blocks:
            is_last = block == self.copies.sizes.blocks[-1]
            fits = (span.count > least) if is_last else (span.count > least) & (span.count <= block)
            pl.when(fits)(lambda block=block: self.attend.many_tokens(refs, span, chunk, slot, side, block))
            least = block

        @pl.when(last)
        def _() -> None:
            self.copies.send(refs, span, side)

        return next_row, next_tile, next_chunk, step + 1, next_item
