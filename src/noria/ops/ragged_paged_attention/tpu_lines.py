"""How keys and values lie in memory for the TPU kernel: in lines of 128 words of 32 bits.

A TPU copies and computes in tiles of 128 lanes and 8 rows of 32 bits, narrower types packed. Arrays of other shapes are
padded, so [block_size, kv_heads, 2, head_dim] would take twice its size for heads of 64 or for 8-bit values. In lines
nothing is padded but heads of 80, 96 and 192 (to 128, 128 and 256) and an odd number of 8-bit heads, and the lines of a
token, of a page, or one line of every token can be addressed whatever the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noria.ops.ragged_paged_attention.types import CACHE_DTYPES, KVCache

LANES = 128


@dataclass(frozen=True)
class Lines:
    """Of one device's KV heads.

    Heads narrower than half a line lie side by side and count as one, a *lane head*, of 128 lanes; wider ones take
    `pieces` of 128 lanes. Numbering the pieces of all lane heads, keys and values of piece f are the values 2 f and
    2 f + 1 of each lane, and `packing` values share a word, the first in its lowest bits.
    """

    kv_heads: int
    head_dim: int
    dtype: str  # a key of CACHE_DTYPES

    @property
    def packing(self) -> int:
        return 4 // CACHE_DTYPES[self.dtype].itemsize

    @property
    def side(self) -> int:
        """KV heads in a lane head."""
        return max(1, LANES // _power_of_two(self.head_dim))

    @property
    def pieces(self) -> int:
        return -(-self.head_dim // LANES)

    @property
    def width(self) -> int:
        """Lanes of a lane head's keys."""
        return self.pieces * LANES

    @property
    def heads_in_line(self) -> int:
        return max(1, self.packing // (2 * self.pieces))

    @property
    def lines_of_head(self) -> int:
        return max(1, 2 * self.pieces // self.packing)

    @property
    def heads(self) -> int:
        """Lane heads, those included that only fill the last line."""
        return _round_up(-(-self.kv_heads // self.side), self.heads_in_line)

    @property
    def lines(self) -> int:
        """Of a token. A number that tiles take without padding: 1, 2, 4 or a multiple of 8."""
        count = self.heads // self.heads_in_line * self.lines_of_head
        return _power_of_two(count) if count < 8 else _round_up(count, 8)

    @property
    def scale_width(self) -> int:
        """Words of a token's scales, of keys and values of each KV head."""
        return 2 * _power_of_two(self.heads * self.side)

    def scale_tokens(self, block_size: int) -> int:
        """Of a line of scales."""
        return min(LANES // self.scale_width, block_size)

    def scale_lines(self, block_size: int) -> int:
        """Of a block, which holds the scales of its tokens one after the other."""
        count = -(-self.scale_width * block_size // LANES)
        return _power_of_two(count) if count < 8 else _round_up(count, 8)

    def abstract(self, rows: int, block_size: int, devices: int = 1) -> KVCache:
        """Shapes (jax.ShapeDtypeStruct) of the cache of `devices` that share the KV heads, as lines.

        data: int32 [rows, block_size, lines, 128]; scale, for int8: float32 [rows, 1, scale_lines, 128]. The third axis
        is the one to split.
        """
        data = jax.ShapeDtypeStruct((rows, block_size, devices * self.lines, LANES), jnp.int32)
        scale = None
        if self.dtype == "int8":
            scale = jax.ShapeDtypeStruct((rows, 1, devices * self.scale_lines(block_size), LANES), jnp.float32)
        return KVCache(data, scale, self.dtype)  # pyright: ignore[reportArgumentType]

    def bytes_per_block(self, block_size: int) -> int:
        """Of one device in one layer slot."""
        scales = self.scale_lines(block_size) if self.dtype == "int8" else 0
        return 4 * LANES * (block_size * self.lines + scales)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """[..., kv_heads, head_dim] each, bits of the cache's values, unsigned -> int32 [..., lines, 128]."""
        k, v = self._pieces(k), self._pieces(v)  # [..., pieces of all lane heads, 128]
        if self.packing == 1:
            words = jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, LANES)
        else:
            width, shared = np.uint32(32 // self.packing), self.packing // 2
            words = jnp.uint32(0)
            for index in range(shared):
                both = k[..., index::shared, :] | v[..., index::shared, :] << width
                words |= both << (2 * index * width)
        words = jnp.pad(words, [(0, 0)] * (k.ndim - 2) + [(0, self.lines - words.shape[-2]), (0, 0)])
        return lax.bitcast_convert_type(words, jnp.int32)

    def _pieces(self, bits: jax.Array) -> jax.Array:
        narrow = LANES // self.side if self.side > 1 else self.width
        pad = (0, self.heads * self.side - self.kv_heads), (0, narrow - self.head_dim)
        bits = jnp.pad(bits.astype(jnp.uint32), [(0, 0)] * (bits.ndim - 2) + list(pad))
        return bits.reshape(*bits.shape[:-2], -1, LANES)

    def unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `pack` was given."""
        width = 32 // self.packing
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = words[..., : self.heads // self.heads_in_line * self.lines_of_head, :]
        values = jnp.stack([words >> np.uint32(index * width) for index in range(self.packing)], axis=-2)
        values = values.reshape(*words.shape[:-2], -1, 2, LANES).astype(jnp.dtype(f"uint{width}"))
        shape = (*words.shape[:-2], self.heads * self.side, -1)
        k, v = (values[..., which, :].reshape(shape)[..., : self.kv_heads, : self.head_dim] for which in range(2))
        return k, v

    def scale_place(self, block_size: int) -> tuple[jax.Array, jax.Array]:
        """Line and lane of each scale: two of int32 [block_size, kv_heads, 2]."""
        token = jnp.arange(block_size)[:, None, None]
        place = token * self.scale_width + jnp.arange(self.kv_heads)[:, None] * 2 + jnp.arange(2)
        return place // LANES, place % LANES


def _power_of_two(count: int) -> int:
    """The next one."""
    return 1 << max(0, count - 1).bit_length()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
