"""A GGUF file seen as a Hugging Face checkpoint: names mapped back, and what the converter did to the values undone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noria.errors import WeightsError
from noria.weights.base import SLICE_ELEMENTS, Blob, Checkpoint, convert
from noria.weights.gguf_blocks import dequantize, is_packed
from noria.weights.gguf_config import config_from_metadata, generation_config_from_metadata
from noria.weights.gguf_file import Header, TensorInfo, read_header

_DTYPE_NAMES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FACTORS = "rope_freqs.weight"
_TOP: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# One tensor has the matrices of all experts, [experts, out, in].
_EXPERTS: Mapping[str, str] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_GEMMA3_LAYER: Mapping[str, str] = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor comes from, and what undoes the converter.

    interleaved_head: rows of one head when rotary pairs lie next to each other, 0 when they do not. The converter of
    the llama architecture turns a head's rows [first half, second half] into [pair 0, pair 1, ...].
    shift: added to every value.
    """

    info: TensorInfo
    interleaved_head: int = 0
    shift: float = 0.0


class GgufCheckpoint(Checkpoint):
    """See Checkpoint. Raises WeightsError for an unsupported architecture, block type, version or byte order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._blob = Blob(path)
        try:
            self.config = config_from_metadata(path, header.metadata, header.tensors, self._rope_factors(header))
            self._sources = {
                self._hf_name(name): self._source(name, info)
                for name, info in _by_expert(header.tensors)
                if name != _ROPE_FACTORS
            }
        except BaseException:
            self.close()
            raise
        self.generation_config = generation_config_from_metadata(header.metadata)
        self.quantized = any(is_packed(info.type) for info in header.tensors.values())
        counts = Counter[str]()
        for info in header.tensors.values():
            counts[_DTYPE_NAMES.get(info.type, "float32")] += math.prod(info.shape)
        self.native_dtype = max(counts, key=lambda kind: counts[kind])

    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._sources:
            raise self._missing(name)
        return self._sources[name].info.shape

    def read(self, name: str, out: np.ndarray) -> None:
        self._check_out(name, out)
        self._read(self._sources[name], out)

    def block_type(self, name: str) -> str | None:
        source = self._sources[name]
        return source.info.type if is_packed(source.info.type) and len(source.info.shape) == 2 else None

    def read_blocks(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        info, head = self._sources[name].info, self._sources[name].interleaved_head
        rows = info.shape[0]
        blocks = np.empty((rows, info.num_bytes // rows), np.uint8)
        self._blob.read_into(info.offset, blocks.reshape(-1))
        if not head:
            return blocks, None
        order = np.arange(rows, dtype=np.int32).reshape(-1, head // 2, 2).swapaxes(1, 2)
        return blocks, np.ascontiguousarray(order).reshape(-1)

    def close(self) -> None:
        self._blob.close()

    def _hf_name(self, name: str) -> str:
        expert = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\d+)\.weight", name)
        if expert and expert[2] in _EXPERTS:
            return f"model.layers.{expert[1]}.mlp.experts.{expert[3]}.{_EXPERTS[expert[2]]}.weight"
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        table = _GEMMA3_LAYER if self.config["model_type"] == "gemma3_text" else _LAYER
        if layer and layer[2] in table:
            return f"model.layers.{layer[1]}.{table[layer[2]]}.{layer[3]}"
        return _TOP.get(name, name)

    def _rope_factors(self, header: Header) -> np.ndarray | None:
        if _ROPE_FACTORS not in header.tensors:
            return None
        factors = np.empty(header.tensors[_ROPE_FACTORS].shape, np.float32)
        self._read(_Source(header.tensors[_ROPE_FACTORS]), factors)
        return factors

    def _source(self, name: str, info: TensorInfo) -> _Source:
        kind, head_dim = self.config["model_type"], self.config["head_dim"]
        if kind in ("llama", "mixtral") and re.search(r"\.attn_[qk]\.(weight|bias)$", name):
            if info.shape[0] % head_dim:
                raise WeightsError(
                    f"{self.path}: {name} has {info.shape[0]} rows, no multiple of the {head_dim} of a head"
                )
            return _Source(info, interleaved_head=head_dim)
        if kind == "gemma3_text" and name.endswith("norm.weight"):
            return _Source(info, shift=-1.0)  # the file has 1 + w, Hugging Face stores w and adds 1 when it runs
        return _Source(info)

    def _read(self, source: _Source, out: np.ndarray) -> None:
        info, head = source.info, source.interleaved_head
        num_rows = info.shape[0] if len(info.shape) > 1 else 1  # a vector is read as one row
        row = math.prod(info.shape) // num_rows
        row_bytes = info.num_bytes // num_rows
        unit = head if head and num_rows > 1 else 1  # a head's rows stay together
        step = max(1, SLICE_ELEMENTS // (row * unit)) * unit
        raw = np.empty((min(step, num_rows), row_bytes), np.uint8)
        direct = out.dtype == np.float32 and not head
        scratch = None if direct else np.empty((len(raw), row), np.float32)
        rows = out.reshape(num_rows, row)
        for start in range(0, num_rows, step):
            part = rows[start : start + step]
            self._blob.read_into(info.offset + start * row_bytes, raw[: len(part)].reshape(-1))
            values = part if scratch is None else scratch[: len(part)]
            dequantize(info.type, raw[: len(part)], values)
            if source.shift:
                values += np.float32(source.shift)
            if head:
                width = 1 if num_rows == 1 else row
                values = values.reshape(-1, head // 2, 2, width).swapaxes(1, 2)
                part = part.reshape(-1, 2, head // 2, width)
            if values is not part:
                convert(info.name, values, part)


def _by_expert(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The same, in which each matrix of an expert is a tensor of its own: blk.0.ffn_up_exps.7.weight."""
    for name, info in tensors.items():
        stem = re.fullmatch(r"(blk\.\d+\.(\w+))\.weight", name)
        if not stem or stem[2] not in _EXPERTS or len(info.shape) != 3:
            yield name, info
            continue
        size = info.num_bytes // info.shape[0]
        for expert in range(info.shape[0]):
            own = f"{stem[1]}.{expert}.weight"
            yield own, TensorInfo(own, info.shape[1:], info.type, info.offset + expert * size, size)
