"""Tiny models for the combination tests: a config each, with random weights (load_format "dummy")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 192
_COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 48,
    "intermediate_size": 112,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    # Sliding layers beside full ones: several cache groups, blocks that leave the window. One KV head for all.
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 1000.0,
        "rope_theta": 100000.0,
        "sliding_window": 40,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
    },
    # One cache group. As many KV heads as heads, where attention has the smallest matrix products.
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 3,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    # Experts, and a first layer without. So few that several rows choose the same, and some none.
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "hidden_act": "silu",
        "mlp_only_layers": [0],
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # Latent attention, whose cache has one head and no values of its own; experts in groups, and a shared one.
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 32,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "v_head_dim": 20,
    },
    # Sizes at which XLA takes other paths through its matrix products than for the tiny ones.
    "llama-wide": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_attention_heads": 5,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 1600,
    },
}
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "gemma3": (40, 40, None, 40, 40),
    "qwen2": (None,) * 2,
    "qwen3-moe": (None,) * 3,
    "deepseek-v3": (None,) * 3,
    "llama-wide": (None,) * 2,
}


def make_head(name: str, folder: Path) -> Path:
    """The folder of an EAGLE-3 head for that model, with other heads than the model and a smaller vocabulary."""
    path = folder / f"{name}-head"
    if not path.exists():
        path.mkdir()
        model = _COMMON | _CONFIGS[name]
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": model["vocab_size"] - 40,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "head_dim": 20,
            "hidden_act": "silu",
            "intermediate_size": 72,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "rope_theta": 10000.0,
        }
        sizes = {key: model[key] for key in ("hidden_size", "max_position_embeddings", "vocab_size")}
        (path / "config.json").write_text(json.dumps(sizes | own))
    return path


def make_draft(name: str, folder: Path) -> Path:
    """The folder of a draft model for that model: one layer of another family, with a window."""
    path = folder / f"{name}-draft"
    if not path.exists():
        path.mkdir()
        model = _COMMON | _CONFIGS[name]
        own = {
            "architectures": ["MistralForCausalLM"],
            "head_dim": 16,
            "hidden_act": "silu",
            "hidden_size": 32,
            "intermediate_size": 64,
            "model_type": "mistral",
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "rope_theta": 10000.0,
            "sliding_window": 96,
            "tie_word_embeddings": True,
        }
        (path / "config.json").write_text(json.dumps(_COMMON | own | {"vocab_size": model["vocab_size"]}))
    return path


def make_model(name: str, folder: Path) -> Path:
    """Writes the model's folder, unless it is there, and returns it."""
    path = folder / name
    if not path.exists():
        path.mkdir()
        (path / "config.json").write_text(json.dumps(_COMMON | _CONFIGS[name]))
    return path
