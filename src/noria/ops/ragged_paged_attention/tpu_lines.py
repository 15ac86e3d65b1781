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
    `pieces` of 128 lanes. Keys and values of a lane head's piece f are its values 2 f and 2 f + 1 of each lane; where
    the values are the keys (latent attention) there is one for each piece. `packing` values share a word, the first in
    its lowest bits. What a lane head's last word, or a group of lane heads, leaves over is empty.
    """

    kv_heads: int
    head_dim: int
    dtype: str  # a key of CACHE_DTYPES
    planes: int = 2  # keys and values; 1 where they are the same

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
        return max(1, self.packing // (self.planes * self.pieces))

    @property
    def lines_of_head(self) -> int:
        return -(-self.planes * self.pieces // self.packing)

    @property
    def values_of_head(self) -> int:
        """In a lane of its lines, the empty ones included."""
        return self.lines_of_head * self.packing // self.heads_in_line

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
        """Words of a token's scales, of each plane of each KV head."""
        return self.planes * _power_of_two(self.heads * self.side)

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

    def pack(self, *planes: jax.Array) -> jax.Array:
        """For each plane [..., kv_heads, head_dim], bits of the cache's values, unsigned -> int32 [..., lines, 128]."""
        values = jnp.stack([self._pieces(plane) for plane in planes], axis=-2)  # [..., heads, pieces, planes, 128]
        before = values.shape[:-4]
        values = values.reshape(*before, self.heads, -1, LANES)
        empty = self.values_of_head - values.shape[-2]
        values = _pad(values, 2, empty).reshape(*before, -1, LANES)
        words = jnp.uint32(0)
        for index in range(self.packing):
            words |= values[..., index :: self.packing, :] << np.uint32(32 // self.packing * index)
        return lax.bitcast_convert_type(_pad(words, 2, self.lines - words.shape[-2]), jnp.int32)

    def _pieces(self, bits: jax.Array) -> jax.Array:
        narrow = LANES // self.side if self.side > 1 else self.width
        bits = _pad(bits.astype(jnp.uint32), 1, narrow - self.head_dim)
        bits = _pad(bits, 2, self.heads * self.side - self.kv_heads)
        return bits.reshape(*bits.shape[:-2], self.heads, self.pieces, LANES)

    def unpack(self, words: jax.Array) -> tuple[jax.Array, ...]:
        """What `pack` was given."""
        width, before = 32 // self.packing, words.shape[:-2]
        words = lax.bitcast_convert_type(words, jnp.uint32)
        words = words[..., : self.heads // self.heads_in_line * self.lines_of_head, :]
        values = jnp.stack([words >> np.uint32(index * width) for index in range(self.packing)], axis=-2)
        values = values.reshape(*before, self.heads, self.values_of_head, LANES)[..., : self.planes * self.pieces, :]
        values = values.reshape(*before, self.heads, self.pieces, self.planes, LANES).astype(jnp.dtype(f"uint{width}"))
        by_head = lambda plane: values[..., plane, :].reshape(*before, self.heads * self.side, -1)
        return tuple(by_head(plane)[..., : self.kv_heads, : self.head_dim] for plane in range(self.planes))

    def scale_place(self, block_size: int) -> tuple[jax.Array, jax.Array]:
        """Line and lane of each scale: two of int32 [block_size, kv_heads, planes]."""
        token = jnp.arange(block_size)[:, None, None]
        place = token * self.scale_width + jnp.arange(self.kv_heads)[:, None] * self.planes + jnp.arange(self.planes)
        return place // LANES, place % LANES


def _pad(array: jax.Array, axis: int, count: int) -> jax.Array:
    """count zeros behind the axis, counted from the last one, 1."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - axis) + [(0, count)] + [(0, 0)] * (axis - 1)) if count else array


def _power_of_two(count: int) -> int:
    """The next one."""
    return 1 << max(0, count - 1).bit_length()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
