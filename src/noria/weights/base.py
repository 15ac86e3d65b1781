"""What a checkpoint is, whatever its file format, and reading a file piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np

from noria.errors import WeightsError

SLICE_ELEMENTS = 1 << 16  # converted at a time: stays in the processor's cache, and there is no second full copy


class Checkpoint(ABC):
    """An opened model, seen with the conventions of Hugging Face: config keys, tensor names, [out, in] matrices.

    config: the content of config.json. generation_config: {} when there is none; its eos_token_id may be a list.
    quantized: whether any tensor is stored as packed blocks.
    native_dtype: "float32", "bfloat16" or "float16", what most of the parameters are stored as; "float32" when packed.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantized: bool
    native_dtype: str

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Names of all tensors. One that Hugging Face has no name for keeps the file's own."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises WeightsError when there is no such tensor."""

    @abstractmethod
    def read(self, name: str, out: np.ndarray) -> None:
        """Fill `out`, a contiguous float32, bfloat16 or float16 array of the tensor's shape, converting as needed.
        A folder also fills int32 arrays, from tensors of integers.

        Raises WeightsError when there is no such tensor, it cannot be read, or a value exceeds float16's range.
        """

    def block_type(self, name: str) -> str | None:
        """The GGUF type of a tensor that is stored as packed blocks, "Q4_1" say; None for any other."""
        return None

    def read_blocks(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """The blocks of such a matrix, uint8 [out, bytes of a row], and the order of its rows.

        The order is int32 [out]: row n of the tensor is row order[n] of the blocks; None when it is their own.
        """
        raise ValueError(f"{name} is not stored as packed blocks")

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_out(self, name: str, out: np.ndarray) -> None:
        if out.shape != self.shape(name) or not out.flags.c_contiguous:
            raise ValueError(f"{name}: out must be contiguous and of shape {self.shape(name)}, not {out.shape}")

    def _missing(self, name: str) -> WeightsError:
        return WeightsError(f"{self.path} has no tensor {name}; is it complete, and does its config belong to it?")


class Blob:
    """A file read in pieces into arrays.

    Read, not mapped: a mapping would count as memory of this process, and a file that shrinks would kill it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115, closed by close()
            self.size = self._file.seek(0, 2)
        except FileNotFoundError:
            raise WeightsError(f"{path}: no such file") from None
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}") from None

    def read_into(self, offset: int, out: np.ndarray) -> None:
        """Fill `out` (uint8, contiguous) with the bytes at `offset`."""
        if not out.size:  # cannot be cast
            return
        rest = out.data.cast("B")
        try:
            self._file.seek(offset)
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise WeightsError(f"{self.path} is truncated; fetch the file again")
                rest = rest[count:]
        except OSError as error:
            raise WeightsError(f"cannot read {self.path}: {error.strerror}") from None

    def read(self, offset: int, count: int) -> bytes:
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def close(self) -> None:
        self._file.close()


def convert(name: str, values: np.ndarray, out: np.ndarray) -> None:
    """Copy `values` to `out` of another float type. Raises WeightsError when a finite value becomes infinite."""
    if out.dtype == np.float16 and values.dtype.kind != "f":
        values = values.astype(np.float32)  # numpy does not report an overflow from bfloat16
    try:
        with np.errstate(over="raise", invalid="ignore"):
            out[...] = values
    except FloatingPointError:
        raise WeightsError(
            f"{name} has values beyond the range of {out.dtype}; use dtype bfloat16 or float32"
        ) from None
