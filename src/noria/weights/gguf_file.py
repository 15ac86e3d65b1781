"""The header of a GGUF file: its metadata, and where each tensor lies.

Facts of the format (versions 2 and 3, little-endian) are from the GGUF specification in ggml's docs/gguf.md. Plain
Python and numpy, without jax. A parser of our own, because the `gguf` package takes seconds for a vocabulary of 262144
tokens.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noria.errors import WeightsError

# type id -> (name, elements in a block, bytes of a block); the other ids only have a name, for the error message
BLOCK_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
_INTEGERS: Mapping[int, str] = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
_SCALARS: Mapping[int, str] = {**_INTEGERS, 6: "<f4", 7: "?", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # ggml's limit
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: outermost axis first, so a matrix is [out, in]. offset: of the first byte, from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str  # a name of BLOCK_TYPES
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file, without looking at its tensors.

    Numbers are int, float or bool; a string is str (invalid UTF-8 replaced); an array of strings is list[bytes], as
    tokens need not be valid UTF-8; an array of numbers is a numpy array. Raises WeightsError for anything that is not a
    readable GGUF file.
    """
    with _cursor(path) as cursor:
        return cursor.metadata(cursor.counts()[1])


def read_header(path: Path) -> Header:
    """Metadata and tensors of a GGUF file; every tensor is checked to lie within the file.

    Raises WeightsError for what is no GGUF file, is truncated, or has a tensor of an unsupported block type.
    """
    with _cursor(path) as cursor:
        num_tensors, num_pairs = cursor.counts()
        metadata = cursor.metadata(num_pairs)
        if str(metadata.get("split.count", 0)) not in ("0", "1"):
            raise WeightsError(f"{path} is one part of a split GGUF file; join the parts with llama-gguf-split --merge")
        return Header(metadata, cursor.tensors(num_tensors, metadata))


@contextmanager
def _cursor(path: Path) -> Iterator[_Cursor]:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # cannot be mapped
                raise WeightsError(f"{path} is empty; fetch the file again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file") from None
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from None
    with data:
        yield _Cursor(path, data)


class _Cursor:
    """A position in the mapped file; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise self._truncated()
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        return self.take(self.number("<u8")).decode("utf-8", errors="replace")

    def counts(self) -> tuple[int, int]:
        """Number of tensors and of key-value pairs, after the checks of magic and version."""
        if self.take(min(4, self.size)) != b"GGUF":
            raise WeightsError(f"{self.path} is not a GGUF file (it does not start with GGUF)")
        version = self.number("<u4")
        if version and not version & 0xFFFF:
            raise WeightsError(f"{self.path} is a big-endian GGUF file; only little-endian ones are supported")
        if version not in (2, 3):
            raise WeightsError(f"{self.path} has GGUF version {version}; supported are versions 2 and 3")
        return self.number("<u8"), self.number("<u8")

    def metadata(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = self.text()
            pairs[key] = self._value(key, self.number("<u4"))
        return pairs

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self._damaged(f"the value of {key!r} has the unknown type {kind}")
        item_kind, length = self.number("<u4"), self.number("<u8")
        if item_kind == _STRING:
            return self._strings(length)
        if item_kind not in _SCALARS:
            raise self._damaged(f"the array {key!r} has items of the unsupported type {item_kind}")
        dtype = np.dtype(_SCALARS[item_kind])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[bytes]:
        # written flat: a vocabulary has hundreds of thousands of strings
        data, size, position, length_at = self.data, self.size, self.position, _U64.unpack_from
        strings: list[bytes] = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise self._truncated()
            position = start + length_at(data, position)[0]
            if position > size:
                raise self._truncated()
            strings.append(data[start:position])
        self.position = position
        return strings

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        entries = [self._tensor() for _ in range(count)]
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            type_name, block_size, block_bytes = self._block_type(name, type_id)
            if not shape or math.prod(shape) == 0 or shape[-1] % block_size:
                raise self._damaged(f"tensor {name!r} has the shape {shape}, which {type_name} cannot hold")
            if name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            num_bytes = math.prod(shape) // block_size * block_bytes
            if start + offset + num_bytes > self.size:
                raise WeightsError(
                    f"{self.path} is truncated: tensor {name} ends at byte {start + offset + num_bytes}, the file at "
                    f"{self.size}; fetch the file again"
                )
            tensors[name] = TensorInfo(name, shape, type_name, start + offset, num_bytes)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.text(), self.number("<u4")
        if num_dims > _MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self.number("<u8") for _ in range(num_dims)]  # innermost first
        return name, tuple(reversed(dims)), self.number("<u4"), self.number("<u8")

    def _block_type(self, name: str, type_id: int) -> tuple[str, int, int]:
        if type_id in BLOCK_TYPES:
            return BLOCK_TYPES[type_id]
        supported = ", ".join(kind for kind, _, _ in BLOCK_TYPES.values())
        unknown = _OTHER_TYPES.get(type_id, f"number {type_id}")
        raise WeightsError(f"{self.path}: tensor {name} has the block type {unknown}; supported are {supported}")

    def _truncated(self) -> WeightsError:
        return WeightsError(
            f"{self.path} is truncated: its header goes on beyond {self.size} bytes; fetch the file again"
        )

    def _damaged(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path} is damaged: {what}; fetch the file again")
