"""A Hugging Face folder: config.json and safetensors files, one or several with an index.

The safetensors format: 8 bytes little-endian length of a JSON header, the header {name: {dtype, shape, data_offsets}},
then the bytes of the tensors in row-major order (specification: the README of the safetensors project).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from noria.errors import WeightsError
from noria.weights.base import SLICE_ELEMENTS, Blob, Checkpoint, convert
from noria.weights.expert_names import own_name, parts

_DTYPES: Mapping[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_INTEGERS: Mapping[str, np.dtype] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True, slots=True)
class _Entry:
    blob: Blob
    dtype: str  # a safetensors name
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class FolderCheckpoint(Checkpoint):
    """See Checkpoint. Tensors are float32, float16 or bfloat16, or int32 or int64 where integers are wanted; others may
    be there but not be read."""

    def __init__(self, path: Path, config_only: bool = False) -> None:
        """config_only: do not look for tensors; the native dtype is the one that the config names."""
        self.path = path
        if not (path / "config.json").exists():
            found = next(iter(sorted(path.glob("*.gguf"))), None)
            hint = f"name the file {found} instead" if found else "is it the folder of a Hugging Face model?"
            raise WeightsError(f"{path} has no config.json; {hint}")
        self.config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.exists() else {}
        if method := self.config.get("quantization_config"):
            kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            raise WeightsError(f"{path} is quantized with {kind}, which is not supported; use the unquantized model")
        self.quantized = False
        self._blobs: list[Blob] = []
        try:
            self._entries = {} if config_only else dict(_by_expert(self._open_files()))
            self._drop_extra_layers()
        except WeightsError:
            self.close()
            raise
        self.native_dtype = self._named_dtype() if config_only else self._stored_dtype()

    def _drop_extra_layers(self) -> None:
        """Layers behind the last one that predict further tokens (DeepSeek-V3), which nothing here uses."""
        extra, layers = self.config.get("num_nextn_predict_layers"), self.config.get("num_hidden_layers")
        if type(extra) is int and type(layers) is int:
            stems = tuple(f"model.layers.{layers + index}." for index in range(extra))
            self._entries = {name: entry for name, entry in self._entries.items() if not name.startswith(stems)}

    def _named_dtype(self) -> str:
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return named if named in ("bfloat16", "float16") else "float32"

    def _stored_dtype(self) -> str:
        counts = Counter[str]()
        for entry in self._entries.values():
            if entry.dtype in _DTYPES:
                counts[entry.dtype] += math.prod(entry.shape)
        return _DTYPES[max(counts, key=lambda kind: counts[kind], default="F32")].name

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, out: np.ndarray) -> None:
        self._check_out(name, out)
        entry = self._entry(name)
        known = _INTEGERS if out.dtype.kind == "i" else _DTYPES
        if entry.dtype not in known:
            raise WeightsError(
                f"{entry.blob.path}: tensor {name} has the dtype {entry.dtype}; supported are {', '.join(known)}"
            )
        dtype = known[entry.dtype]
        flat = out.reshape(-1)
        if out.dtype == dtype:
            entry.blob.read_into(entry.offset, flat.view(np.uint8))
            return
        scratch = np.empty(min(flat.size, SLICE_ELEMENTS), dtype)
        for start in range(0, flat.size, SLICE_ELEMENTS):
            part = flat[start : start + SLICE_ELEMENTS]
            values = scratch[: part.size]
            entry.blob.read_into(entry.offset + start * dtype.itemsize, values.view(np.uint8))
            convert(name, values, part)

    def close(self) -> None:
        for blob in self._blobs:
            blob.close()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise self._missing(name)
        return self._entries[name]

    def _open_files(self) -> dict[str, _Entry]:
        if (self.path / _INDEX).exists():
            return self._open_sharded()
        single = self.path / "model.safetensors"
        if not single.exists():
            files = sorted(self.path.glob("*.safetensors"))
            if len(files) > 1:
                raise WeightsError(f"{self.path} has several safetensors files but no {_INDEX}; fetch that file too")
            if not files:
                raise self._no_weights()
            single = files[0]
        return self._open_file(single)

    def _no_weights(self) -> WeightsError:
        if next(self.path.glob("pytorch_model*.bin"), None):
            return WeightsError(
                f"{self.path} has its weights in pytorch_model.bin, which can run code when opened and is not read; "
                "convert them to safetensors (save_pretrained of transformers does)"
            )
        return WeightsError(f"{self.path} has no *.safetensors file; fetch the model's weights too")

    def _open_sharded(self) -> dict[str, _Entry]:
        weight_map = _read_json(self.path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{self.path / _INDEX} has no weight_map; fetch the file again")
        shards: dict[str, dict[str, _Entry]] = {}
        entries: dict[str, _Entry] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise WeightsError(f"{self.path / _INDEX} names {file!r} for {name}, which is no file of the folder")
            if file not in shards:
                if not os.path.isfile(self.path / file):  # False, too, for a name that no file can have
                    raise WeightsError(f"{self.path} lacks the shard {file} that {_INDEX} names; fetch it too")
                shards[file] = self._open_file(self.path / file)
            if name not in shards[file]:
                raise WeightsError(f"{self.path / file} has no tensor {name}, but {_INDEX} says so; fetch both again")
            entries[name] = shards[file][name]
        return entries

    def _open_file(self, path: Path) -> dict[str, _Entry]:
        blob = Blob(path)
        self._blobs.append(blob)
        if blob.size < 8:
            raise WeightsError(f"{path} is truncated: {blob.size} bytes; fetch the file again")
        length = int.from_bytes(blob.read(0, 8), "little")
        if length > _MAX_HEADER:
            raise WeightsError(f"{path} is not a safetensors file (its header would have {length} bytes)")
        if 8 + length > blob.size:
            raise WeightsError(f"{path} is truncated: its header goes beyond {blob.size} bytes; fetch the file again")
        try:
            header = json.loads(blob.read(8, length).decode())
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise WeightsError(f"{path} is not a safetensors file (its header is not a JSON object)")
        header.pop("__metadata__", None)
        return {name: _entry(blob, name, fields, 8 + length) for name, fields in header.items()}


def _by_expert(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, _Entry]]:
    """The same, in which each matrix of an expert is a tensor of its own."""
    for name, entry in entries.items():
        pieces = list(parts(name, entry.shape)) if entry.dtype in _DTYPES else []
        for part, shape, start in pieces:
            size = _DTYPES[entry.dtype].itemsize
            yield part, _Entry(entry.blob, entry.dtype, shape, entry.offset + start * size, math.prod(shape) * size)
        if not pieces:
            yield own_name(name), entry


def _entry(blob: Blob, name: str, fields: Any, start: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (TypeError, KeyError, ValueError):
        dtype, shape, begin, end = None, (), 0, 0
    sizes_are_right = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    if not isinstance(dtype, str) or not sizes_are_right:
        raise WeightsError(f"{blob.path} is damaged: the header's entry {name!r} is malformed; fetch the file again")
    kind = _DTYPES.get(dtype, _INTEGERS.get(dtype))
    if kind is not None and end - begin != math.prod(shape) * kind.itemsize:
        raise WeightsError(f"{blob.path} is damaged: tensor {name} has the wrong number of bytes; fetch the file again")
    if start + end > blob.size:
        raise WeightsError(
            f"{blob.path} is truncated: tensor {name} ends at byte {start + end}, the file at {blob.size}; "
            "fetch the file again"
        )
    return _Entry(blob, dtype, shape, start + begin, end - begin)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise WeightsError(f"{path} is not a JSON object; fetch the file again")
    return content
