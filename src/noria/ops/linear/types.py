"""What the linear op works on: weights of all layers, dense or packed for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import numpy as np
from jax import tree_util

LANES = 16  # outputs of a tile
ALIGNMENT = 64  # bytes; where a layer begins


@dataclass(frozen=True)
class Kind:
    """How a packed weight is stored; native/linear/formats.h describes the bytes.

    A tile is `header` bytes and then, for each `block` elements along K, `block_bytes`; always for 16 outputs.
    source_block_bytes: size of the block in a GGUF file, which has the same number of elements; 0 for other kinds.
    """

    number: int
    block: int
    block_bytes: int
    header: int = 0
    source_block_bytes: int = 0

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one layer's matrix, up to the next layer's begin."""
        tile = self.header + -(-in_features // self.block) * self.block_bytes
        size = -(-out_features // LANES) * tile
        return -(-size // ALIGNMENT) * ALIGNMENT


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "float32": Kind(0, 4, 256),
        "bfloat16": Kind(1, 4, 128),
        "int8": Kind(2, 32, 512, header=64),
        "Q8_0": Kind(3, 32, 32 + 512, source_block_bytes=34),
        "Q4_0": Kind(4, 32, 32 + 256, source_block_bytes=18),
        "Q4_1": Kind(5, 32, 64 + 256, source_block_bytes=20),
        "Q5_0": Kind(6, 32, 32 + 320, source_block_bytes=22),
        "Q5_1": Kind(7, 32, 64 + 320, source_block_bytes=24),
        "Q4_K": Kind(8, 256, 320 + 8 * 256, source_block_bytes=144),
        "Q5_K": Kind(9, 256, 320 + 8 * 320, source_block_bytes=176),
        "Q6_K": Kind(10, 256, 288 + 8 * 384, source_block_bytes=210),
    }
)


@tree_util.register_dataclass
@dataclass(frozen=True)
class DenseWeight:
    """data: [layers, out, in], as checkpoints store matrices; 8-bit ones with scale, float32 [layers, out].

    Those of experts are [layers, experts, out, in], see ops/experts.
    """

    data: jax.Array
    scale: jax.Array | None = None

    @property
    def out_features(self) -> int:
        return self.data.shape[-2]

    @property
    def in_features(self) -> int:
        return self.data.shape[-1]

    @property
    def layers(self) -> int:
        return self.data.shape[0]


@tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """data: uint8 [bytes], the tiles of all layers; layer l begins at offsets[l]. Made by pack.py.

    kinds: a name of KINDS for each layer, since a GGUF file may store the same matrix differently from layer to layer.
    """

    data: jax.Array
    kinds: tuple[str, ...] = field(metadata={"static": True})
    out_features: int = field(metadata={"static": True})
    in_features: int = field(metadata={"static": True})

    @property
    def has_codes(self) -> bool:
        """Whether a layer holds integer codes, for which activations may be rounded."""
        return any(kind not in ("float32", "bfloat16") for kind in self.kinds)

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def offsets(self) -> tuple[int, ...]:
        sizes = [KINDS[kind].packed_bytes(self.out_features, self.in_features) for kind in self.kinds]
        return tuple(int(end) - size for end, size in zip(np.cumsum(sizes), sizes))

    @staticmethod
    def total_bytes(kinds: tuple[str, ...], out_features: int, in_features: int) -> int:
        return sum(KINDS[kind].packed_bytes(out_features, in_features) for kind in kinds)

    @staticmethod
    def abstract(kinds: tuple[str, ...], out_features: int, in_features: int) -> PackedWeight:
        """The shape (jax.ShapeDtypeStruct) of such a weight."""
        size = PackedWeight.total_bytes(kinds, out_features, in_features)
        data = jax.ShapeDtypeStruct((size,), np.uint8)
        return PackedWeight(data, kinds, out_features, in_features)  # pyright: ignore[reportArgumentType]


Weight = DenseWeight | PackedWeight
