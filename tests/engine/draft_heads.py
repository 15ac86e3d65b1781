"""Draft heads for the tests: folders in the layout of published EAGLE-3 heads, with given or random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 192,
    "draft_vocab_size": 120,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, mlp, draft = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (mlp, size),
        "midlayer.mlp.up_proj.weight": (mlp, size),
        "midlayer.mlp.down_proj.weight": (size, mlp),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, shape in shapes(config).items():
        noise = rng.standard_normal(shape, np.float32)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise / np.sqrt(np.float32(shape[1]))
    chosen = np.sort(rng.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
    tensors["d2t"] = (chosen - np.arange(len(chosen))).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), chosen)
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
