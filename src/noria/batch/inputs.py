"""What one step uploads: packed int32 buffers, two in most steps, and how both sides find their fields in them.

One transfer instead of a dozen: each costs a fixed latency that a decode step cannot hide. Floats and 64-bit keys
travel as their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

import numpy as np

NOT_SAMPLED = -2  # in place of a token that was not asked for, or that a wrong draft made worthless
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _views(buffer: Any, shapes: Shapes) -> dict[str, Any]:
    """Slices of the last axis of a buffer (numpy: views; traced: static slices) by name."""
    views, start = {}, 0
    for name, shape in shapes:
        views[name] = buffer[..., start : start + math.prod(shape)].reshape((*buffer.shape[:-1], *shape))
        start += math.prod(shape)
    return views


def _size(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes that an engine keeps for its whole life, of one of its ranks. Row r * R + i of the batch is row i of
    rank r; arrays of all ranks are rank-major like that."""

    num_rows: int  # R: requests
    num_groups: int  # G: cache groups
    num_blocks: int  # B: entries of a block table, enough for max_model_len, or, where there is `long`, most_model_len
    num_drafts: int = 0  # most drafts of a step
    has_head: bool = False  # whether a draft head follows the model
    num_ranks: int = 1
    most_model_len: int | None = None  # tokens of a row that is short; None: all are, and there is no `long`
    long: BatchShape | None = None  # that forward passes with other rows have; on one rank

    def divided(self, most_model_len: int, block_size: int) -> BatchShape:
        """This shape, whose tables hold max_model_len, with shorter tables, and a second one for longer requests: with
        about as many table entries in fewer rows, and as many rows of the head pass."""
        num_blocks = -(-most_model_len // block_size)
        rows = max(1, self.num_rows * num_blocks // self.num_blocks)
        long = replace(self, num_rows=rows, num_drafts=self.num_logit_rows - rows)
        return replace(self, num_blocks=num_blocks, most_model_len=most_model_len, long=long)

    @property
    def table_size(self) -> int:
        """Entries of a block table that holds max_model_len."""
        return (self.long or self).num_blocks

    @property
    def num_logit_rows(self) -> int:
        """L: most rows of a head pass: one for each row, and one for each draft."""
        return self.num_rows + self.num_drafts

    @property
    def all_rows(self) -> int:
        """Of all ranks: max_num_seqs."""
        return self.num_ranks * self.num_rows

    @property
    def all_logit_rows(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.num_logit_rows


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """int32 arrays of one forward pass of one rank (T tokens, R rows); padding as RaggedBatch says. Arrays of numpy or
    of jax."""

    token_ids: Any  # [T]
    token_sources: Any  # [T]: the token's place among all that the step before sampled; -1 where token_ids has it
    positions: Any  # [T]
    token_rows: Any  # [T]
    query_start: Any  # [R + 1]
    seq_lens: Any  # [R]
    logit_rows: Any  # [L]: token whose hidden state each row of the head pass samples from
    block_tables: Any  # [G, R, B]
    distribution: Any  # [3]

    @staticmethod
    def shapes(shape: BatchShape, num_tokens: int) -> Shapes:
        rows = shape.num_rows
        return (
            ("token_ids", (num_tokens,)),
            ("token_sources", (num_tokens,)),
            ("positions", (num_tokens,)),
            ("token_rows", (num_tokens,)),
            ("query_start", (rows + 1,)),
            ("seq_lens", (rows,)),
            ("logit_rows", (shape.num_logit_rows,)),
            ("block_tables", (shape.num_groups, rows, shape.num_blocks)),
            ("distribution", (3,)),
        )

    @classmethod
    def allocate(cls, shape: BatchShape, num_tokens: int) -> tuple[np.ndarray, ForwardInputs]:
        """A buffer of zeros and the inputs as views into it."""
        buffer = np.zeros(_size(cls.shapes(shape, num_tokens)), np.int32)
        return buffer, cls.unpack(buffer, shape, num_tokens)

    @classmethod
    def unpack(cls, buffer: Any, shape: BatchShape, num_tokens: int) -> ForwardInputs:
        return cls(**_views(buffer, cls.shapes(shape, num_tokens)))

    @classmethod
    def of_ranks(cls, buffer: Any, shape: BatchShape) -> ForwardInputs:
        """From the buffer of one rank, or those of all [ranks, size]: the arrays of all ranks, one behind the other.

        What they name (rows, tokens, blocks) is counted from the beginning of the rank's part.
        """
        num_tokens = cls.num_tokens(buffer.shape[-1], shape)
        if buffer.ndim == 1:
            return cls.unpack(buffer, shape, num_tokens)
        views = _views(buffer, cls.shapes(shape, num_tokens))
        tables = views.pop("block_tables").swapaxes(0, 1)  # [G, ranks, R, B]
        flat = {name: view.reshape(-1) for name, view in views.items()}
        return cls(**flat, block_tables=tables.reshape(tables.shape[0], -1, tables.shape[-1]))

    @classmethod
    def num_tokens(cls, buffer_size: int, shape: BatchShape) -> int:
        """T of a buffer of that size."""
        fixed = _size(cls.shapes(shape, 0))
        return (buffer_size - fixed) // (_size(cls.shapes(shape, 1)) - fixed)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """int32 arrays for a draft head that follows a step, see HeadPrograms.follow. T tokens, L rows of the head pass, of
    one rank; of several they have one more axis in front."""

    next_ids: Any  # [T]: the token behind each token
    next_sources: Any  # [T]: its place among all that the step samples; -1 where next_ids has it
    state_rows: Any  # [L]: row of the rank behind each row of the head pass; R for padding

    @staticmethod
    def shapes(shape: BatchShape, num_tokens: int) -> Shapes:
        return (("next_ids", (num_tokens,)), ("next_sources", (num_tokens,)), ("state_rows", (shape.num_logit_rows,)))

    @classmethod
    def allocate(cls, shape: BatchShape, num_tokens: int) -> tuple[np.ndarray, HeadInputs]:
        """A buffer of zeros and the inputs as views into it. num_tokens: of a rank."""
        size, ranks = _size(cls.shapes(shape, num_tokens)), shape.num_ranks
        buffer = np.zeros(size if ranks == 1 else (ranks, size), np.int32)
        return buffer, cls.unpack(buffer, shape, num_tokens)

    @classmethod
    def unpack(cls, buffer: Any, shape: BatchShape, num_tokens: int) -> HeadInputs:
        """num_tokens: of a rank."""
        return cls(**_views(buffer, cls.shapes(shape, num_tokens)))


class _Rows:
    """What the buffers with one entry per row of a head pass have in common. Subclasses are dataclasses of arrays."""

    __slots__ = ()
    FLOATS: ClassVar[tuple[str, ...]] = ()  # fields that are float32
    INNER: ClassVar[Mapping[str, tuple[int, ...]]] = MappingProxyType({})  # shapes of fields that are not [rows]

    @classmethod
    def shapes(cls, rows: int) -> Shapes:
        return tuple((f.name, (rows, *cls.INNER.get(f.name, ()))) for f in fields(cast("Any", cls)))

    @classmethod
    def allocate(cls, rows: int, ranks: int = 1) -> tuple[np.ndarray, Self]:
        """A buffer of zeros and the inputs as views into it; float fields are float32 views. rows: of each of the
        ranks; where there are several, buffer and views have one more axis in front."""
        size = _size(cls.shapes(rows))
        buffer = np.zeros(size if ranks == 1 else (ranks, size), np.int32)
        return buffer, cls.unpack(buffer, lambda bits: bits.view(np.float32))

    @classmethod
    def of_ranks(cls, buffer: Any, to_float: Any) -> Self:
        """The rows of all ranks, one behind the other."""
        inputs = cls.unpack(buffer, to_float)
        if buffer.ndim == 1:
            return inputs
        flat = lambda view: view.reshape(-1, *view.shape[2:])
        return cls(**{f.name: flat(getattr(inputs, f.name)) for f in fields(cast("Any", cls))})

    @classmethod
    def unpack(cls, buffer: Any, to_float: Any) -> Self:
        """to_float: int32 bits -> float32, on whatever side the buffer is."""
        rows = buffer.shape[-1] // _size(cls.shapes(1))
        views = _views(buffer, cls.shapes(rows))
        return cls(**views | {name: to_float(views[name]) for name in cls.FLOATS})


@dataclass(frozen=True, slots=True)
class SampleInputs(_Rows):
    """Sampling parameters of the rows of one head pass, each [rows] and 32 bits wide. Padding rows are greedy.

    A request has one row, or, with drafts, one for the token that follows each of its last scheduled tokens.
    """

    temperature: Any  # float32; 0 is greedy
    top_p: Any  # float32
    min_p: Any  # float32
    top_k: Any  # int32; 0 for all
    key_low: Any  # int32 bits of the request's random key
    key_high: Any
    position: Any  # int32: position of the token to be sampled; in a burst of the first one
    num_steps: Any  # int32: tokens to be sampled one after the other; 0 for padding rows
    num_stops: Any  # int32: the first so many of `stops` count
    banned_until: Any  # int32: the position at which stop tokens begin to be allowed, as min_tokens asks
    draft: Any  # int32: the token that must be sampled here for the next row to count; -1 for the request's last row
    place: Any  # int32: among the rows of the request
    stops: Any  # int32 [rows, MAX_STOPS]: stop tokens

    FLOATS: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "min_p")
    MAX_STOPS: ClassVar[int] = 16
    INNER: ClassVar[Mapping[str, tuple[int, ...]]] = MappingProxyType({"stops": (MAX_STOPS,)})


@dataclass(frozen=True, slots=True)
class ShapingInputs(_Rows):
    """What the rows of one head pass ask of the sampler beyond SampleInputs. Padding rows ask for nothing."""

    table_row: Any  # int32: the row's place in the tables of its rank, see step/shape.py
    counts: Any  # int32: 1 where the token that is sampled enters the counts
    has_bias: Any  # int32: 1 where the row's biases count
    presence: Any  # float32; 0 for none
    frequency: Any  # float32; 0 for none
    repetition: Any  # float32; 1 for none
    scores: Any  # int32: 1 where log-probabilities are asked for
    newest: Any  # int32: place of the newest token among those the step before sampled; -1 where `tail` has it
    tail: Any  # int32 [rows, MAX_BAD_LENGTH - 1]: the last generated tokens, the newest last; -1 before the first
    bad: Any  # int32 [rows, MAX_BAD, MAX_BAD_LENGTH]: sequences of tokens that must not be completed; -1 before them

    FLOATS: ClassVar[tuple[str, ...]] = ("presence", "frequency", "repetition")
    MAX_BAD: ClassVar[int] = 64
    MAX_BAD_LENGTH: ClassVar[int] = 8
    INNER: ClassVar[Mapping[str, tuple[int, ...]]] = MappingProxyType(
        {"tail": (MAX_BAD_LENGTH - 1,), "bad": (MAX_BAD, MAX_BAD_LENGTH)}
    )
