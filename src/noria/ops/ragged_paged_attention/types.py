"""What the attention op works on: the paged cache and the ragged batch of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import tree_util

CACHE_DTYPES: Mapping[str, jnp.dtype] = MappingProxyType(
    {
        "float32": jnp.dtype(jnp.float32),
        "bfloat16": jnp.dtype(jnp.bfloat16),
        "float16": jnp.dtype(jnp.float16),
        "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
        "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
        "int8": jnp.dtype(jnp.int8),
    }
)


@tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The paged cache of all layers: layer slot s keeps block b in row s * num_blocks + b. Block 0 is never read.

    What nobody wrote may hold anything, even NaN: no result depends on it.

    For the kernel of TPUs the arrays are lines, as tpu_lines.py says; elsewhere:
    data: [slots * num_blocks, block_size, kv_heads, 2, head_dim]; index 0 of the axis of length 2 is keys, 1 is values.
    In a cache whose values are its keys (latent attention) that axis has length 1.
    On a CPU floats narrower than 32 bits are kept as the unsigned integers with their bits: to write a few values into
    an array of such floats, XLA converts the whole array to float32 and back there. Elsewhere they are what they are,
    since a kernel that wants floats would be given a copy of the whole array.
    dtype: of the values, a key of CACHE_DTYPES.
    scale: float32 [slots * num_blocks, block_size, kv_heads, 2] for int8 (one scale per token and head), else None.
    """

    data: jax.Array
    scale: jax.Array | None
    dtype: str = field(metadata={"static": True})

    @property
    def block_size(self) -> int:
        return self.data.shape[1]

    @staticmethod
    def abstract(
        rows: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        planes: int = 2,
        as_bits: bool = True,
    ) -> KVCache:
        """The shapes (jax.ShapeDtypeStruct) of a cache; dtype is a key of CACHE_DTYPES. planes: 1 where the values are
        the keys. as_bits: as CPUs want it."""
        shape = (rows, block_size, kv_heads, planes, head_dim)
        scale = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if dtype == "int8" else None
        data = jax.ShapeDtypeStruct(shape, _stored_as(dtype) if as_bits else CACHE_DTYPES[dtype])
        return KVCache(data, scale, dtype)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def bytes_per_block(block_size: int, kv_heads: int, head_dim: int, dtype: str, planes: int = 2) -> int:
        """Bytes of one block in one layer slot."""
        scale = 4 if dtype == "int8" else 0
        return block_size * kv_heads * planes * (head_dim * CACHE_DTYPES[dtype].itemsize + scale)


def _stored_as(dtype: str) -> jnp.dtype:
    kind = CACHE_DTYPES[dtype]
    narrow = jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4
    return jnp.dtype(f"uint{8 * kind.itemsize}") if narrow else kind


@tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The requests of one step, decode rows (one token each) first, then prefill rows. T tokens, R rows, both padded.

    Row r owns tokens query_start[r] : query_start[r + 1]; they are its last ones, at positions seq_lens[r] - n and up.
    A decode row with a seq_len of 0 is padding wherever it stands, also between others, and so is its token: in a burst
    a row that has ended reads nothing and writes to the null block.
    """

    token_rows: jax.Array  # [T] int32: row of each token; R for padding
    positions: jax.Array  # [T] int32: position of each token in its sequence; 0 for padding
    query_start: jax.Array  # [R + 1] int32: running sum of tokens; the tail repeats the total
    seq_lens: jax.Array  # [R] int32: computed + scheduled tokens; 0 for padding
    block_tables: jax.Array  # [G, R, B] int32: blocks of each cache group; 0 where there is none
    distribution: jax.Array  # [3] int32: end of decode rows, end of fixed-size prefill rows, end of all rows
    # Of several ranks, the arrays of one come behind those of another (block tables along R), all equally long, and
    # with their own numbering. No op sees that: parallel/ops.py gives each the part of its rank.
    num_ranks: int = field(default=1, metadata={"static": True})

    @property
    def num_tokens(self) -> jax.Array:
        """Those before the padding; of several ranks each has its own, and all count."""
        return self.query_start[-1] if self.num_ranks == 1 else jnp.int32(self.positions.shape[0])


@tree_util.register_dataclass
@dataclass(frozen=True)
class LayerAddress:
    """Where a layer's cache lies and how far it sees. Scalars, so that a scan over layers can carry them."""

    group: jax.Array  # int32: cache group, an index into RaggedBatch.block_tables
    offset: jax.Array  # int32: slot * num_blocks, added to every block id
    window: jax.Array  # int32: a token sees itself and window - 1 tokens before; FULL_ATTENTION for all


FULL_ATTENTION = 2**30  # a window longer than any sequence
