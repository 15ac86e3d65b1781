"""Models and heads that draft for the tiny text model, and options to draft with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HEAD = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 120,
    "num_hidden_layers": 1,
}
STATES = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 56}
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}


def narrow_model(model: Path, folder: Path) -> Path:
    """The same with half of its heads, which four devices cannot share."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | NARROW))
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name] = np.ascontiguousarray(value[: len(value) // 2])
        elif name.endswith("o_proj.weight"):
            weights[name] = np.ascontiguousarray(value[:, : value.shape[1] // 2])
    save_file(weights, folder / "model.safetensors")
    return folder


def head_config(model: Path) -> dict[str, Any]:
    """Of an EAGLE-3 head for the model."""
    target = json.loads((model / "config.json").read_text())
    own = ("hidden_size", "vocab_size", "max_position_embeddings", "hidden_act", "rms_norm_eps")
    return {name: target[name] for name in own} | {"rope_theta": 1e4} | HEAD | STATES | SIZES


def make_head(model: Path, folder: Path, **sizes: int) -> Path:
    """The folder of one with random weights: it guesses right where the noise of high temperatures decides."""
    config = head_config(model) | sizes
    size, mlp, draft = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention, mlps = "midlayer.self_attn.", "midlayer.mlp."
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        attention + "q_proj.weight": (heads, 2 * size),
        attention + "k_proj.weight": (kv, 2 * size),
        attention + "v_proj.weight": (kv, 2 * size),
        attention + "o_proj.weight": (size, heads),
        mlps + "gate_proj.weight": (mlp, size),
        mlps + "up_proj.weight": (mlp, size),
        mlps + "down_proj.weight": (size, mlp),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
    }
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, np.float32)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise / np.sqrt(np.float32(shape[1]))
    chosen = np.sort(rng.permutation(config["vocab_size"])[:draft])
    tensors["d2t"] = (chosen - np.arange(draft)).astype(np.int64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_drafts(method: str, model: Path) -> dict[str, Any]:
    """Options of an engine. The cache of a draft model is small."""
    speculation = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    return {"speculative_config": speculation, "kv_cache_memory_bytes": 2**20}
