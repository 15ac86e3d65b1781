"""Tiny model files made on the fly: safetensors folders, and GGUF files as llama.cpp's converter would write them."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, quants

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2, 64, 4, 2, 32, 96, 48
EXPERTS, EXPERT_FFN = 3, 32
EXTRA_KEYS = {
    "gemma3": {"attention.sliding_window": 16},
    "qwen3moe": {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_FFN},
}
EXPERT_MATRICES = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def hf_tensors(model_type: str, seed: int = 0, biases: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors with the names and shapes of transformers; values that bfloat16 can hold."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (q, HIDDEN),
        "self_attn.k_proj.weight": (kv, HIDDEN),
        "self_attn.v_proj.weight": (kv, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, q),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    if model_type == "qwen2" or biases:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if model_type in ("qwen3moe", "mixtral"):
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp")}
        layer["mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for matrix in EXPERT_MATRICES:
                shape = (HIDDEN, EXPERT_FFN) if matrix == "down_proj" else (EXPERT_FFN, HIDDEN)
                layer[f"mlp.experts.{expert}.{matrix}.weight"] = shape
    if model_type in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    if model_type == "gemma3":
        layer |= {"pre_feedforward_layernorm.weight": (HIDDEN,), "post_feedforward_layernorm.weight": (HIDDEN,)}
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }


def gguf_name(name: str, model_type: str) -> str:
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if model_type == "gemma3" else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
    }
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{table[stem]}.{suffix}"
    return f"{table[stem]}.{suffix}"


def converted(name: str, values: np.ndarray, model_type: str) -> np.ndarray:
    """What the converter stores: llama's rotary halves interleaved, 1 added to gemma's norms."""
    if model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
        pairs = values.reshape(-1, 2, HEAD_DIM // 2, *values.shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(pairs).reshape(values.shape)
    if model_type == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    model_type: str = "llama",
    kind: str = "F32",
    keys: dict[str, object] | None = None,
    raw_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """kind: block type of the matrices; vectors are F32. keys: metadata added, or with None left out."""
    writer = gguf.GGUFWriter(path, model_type)
    pairs: dict[str, object] = {
        f"{model_type}.{key}": value
        for key, value in {
            "block_count": LAYERS,
            "context_length": 256,
            "embedding_length": HIDDEN,
            "feed_forward_length": FFN,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 50000.0,
            **EXTRA_KEYS.get(model_type, {}),
        }.items()
    }
    pairs |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in (pairs | (keys or {})).items():
        add_key(writer, key, value)
    for name, values in tensors.items():
        if ".mlp.experts." in name:
            continue
        stored = converted(name, values, model_type)
        chosen = GGMLQuantizationType[kind if stored.ndim == 2 and ".mlp.gate." not in name else "F32"]
        packed = quants.quantize(stored, chosen)
        writer.add_tensor(gguf_name(name, model_type), packed, raw_dtype=chosen)
    for name, stored in stacked_experts(tensors).items():
        chosen = GGMLQuantizationType[kind]
        writer.add_tensor(name, quants.quantize(stored, chosen), raw_dtype=chosen)
    for name, values in (raw_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[experts, out, in] by the name of the file."""
    found: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        if ".mlp.experts." in name:
            _, _, layer, _, _, _, matrix, _ = name.split(".")
            found.setdefault(f"blk.{layer}.{EXPERT_MATRICES[matrix]}.weight", []).append(values)
    return {name: np.stack(values) for name, values in found.items()}


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        add[type(value)](key, value)


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {
            "dtype": kinds[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), end],
        }
        data += values.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_folder(path: Path, tensors: dict[str, np.ndarray], shards: int = 1, config: dict | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if shards == 1:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        (path / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def read_all(checkpoint, dtype=np.float32) -> dict[str, np.ndarray]:
    out = {}
    for name in checkpoint.names():
        out[name] = np.empty(checkpoint.shape(name), dtype)
        checkpoint.read(name, out[name])
    return out
