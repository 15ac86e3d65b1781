"""The metadata of a GGUF file as the config.json and generation_config.json of Hugging Face.

Metadata keys: the GGUF specification (ggml's docs/gguf.md) and the constants of llama.cpp's gguf-py; config keys:
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from noria.errors import WeightsError
from noria.weights.gguf_file import TensorInfo

# GGUF architecture -> (class, model_type, activation)
_ARCHITECTURES: Mapping[str, tuple[str, str, str]] = {
    "llama": ("LlamaForCausalLM", "llama", "silu"),  # Mistral too
    "qwen2": ("Qwen2ForCausalLM", "qwen2", "silu"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", "silu"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", "silu"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", "gelu_pytorch_tanh"),
}
# Tokens that end a turn of a chat; they stop generation although the metadata names a single end token.
_TURN_ENDS = frozenset((b"<|im_end|>", b"<end_of_turn>", b"<|eot_id|>", b"<|eom_id|>"))
_CONTROL_TOKEN = 3
_GEMMA3_27B_LAYERS = 62


class _Metadata:
    """Typed look-up of `{architecture}.{key}`."""

    def __init__(self, path: Path, pairs: dict[str, Any], architecture: str) -> None:
        self.path, self.pairs, self.architecture = path, pairs, architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._scalar(key, default)
        if type(value) is not int or value < 1:
            raise WeightsError(f"{self.path}: {self.architecture}.{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._scalar(key, default)
        if type(value) not in (int, float) or not 1e-30 < value < 1e30:
            raise WeightsError(f"{self.path}: {self.architecture}.{key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))  # stored as float32: 1e-6 comes back as that, not as 9.99999997e-07

    def count(self, key: str) -> int:
        """Like integer, but may be 0, which is also the default."""
        return 0 if (type(value := self.get(key)) is int and value == 0) or value is None else self.integer(key)

    def get(self, key: str) -> Any:
        return self.pairs.get(f"{self.architecture}.{key}")

    def _scalar(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise WeightsError(f"{self.path} lacks the metadata {self.architecture}.{key}; convert the model again")
        if isinstance(value, np.ndarray):  # a value for each layer
            if value.size == 0 or (value != value[0]).any():
                raise WeightsError(f"{self.path}: {self.architecture}.{key} differs between layers: not supported")
            value = value[0].item()
        return value


def config_from_metadata(
    path: Path, pairs: dict[str, Any], tensors: dict[str, TensorInfo], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """A dict like config.json. rope_factors: the tensor rope_freqs.weight, which Llama 3 models have.

    Raises WeightsError for an unsupported architecture and for missing or impossible values.
    """
    architecture = pairs.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise WeightsError(
            f"{path} has the architecture {architecture!r}; supported in GGUF files are {', '.join(_ARCHITECTURES)}"
        )
    meta = _Metadata(path, pairs, architecture)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{path} has no tensor token_embd.weight; only complete language models can be opened")
    class_name, model_type, activation = _ARCHITECTURES[architecture]
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    if head_dim % 2 or meta.integer("attention.value_length", head_dim) != head_dim:
        raise WeightsError(f"{path}: heads of {head_dim} keys and another or odd number of values are not supported")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": activation,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, rope_factors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": _token_id(pairs, "bos"),
        "eos_token_id": _token_id(pairs, "eos"),
    }
    if config["num_hidden_layers"] > len(tensors):
        raise WeightsError(f"{path} is damaged: {len(tensors)} tensors for {config['num_hidden_layers']} layers")
    if meta.count("expert_count"):
        return config | _experts(meta)
    return config | _gemma3(meta, config) if architecture == "gemma3" else config


def _experts(meta: _Metadata) -> dict[str, Any]:
    """Of a mixture of experts. Mixtral is one of the architecture llama."""
    chosen = {"num_experts_per_tok": meta.integer("expert_used_count")}
    if meta.architecture == "llama":
        count = {"num_local_experts": meta.integer("expert_count")}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | count | chosen
    if meta.architecture != "qwen3moe":
        raise WeightsError(
            f"{meta.path}: a mixture of experts of the architecture {meta.architecture} is not supported; supported "
            "are llama (Mixtral) and qwen3moe"
        )
    return {
        "num_experts": meta.integer("expert_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # the file does not say; all models of the architecture have it
        "decoder_sparse_step": 1,
    } | chosen


def _gemma3(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    is_27b = layers == _GEMMA3_27B_LAYERS
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) == layers:
        sliding = pattern.tolist()
    else:
        period = meta.integer("attention.sliding_window_pattern", 6)
        sliding = [bool((layer + 1) % period) for layer in range(layers)]
    return {
        "hidden_activation": config["hidden_act"],
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        # the 27B model is the one whose queries are not scaled by the head's size
        "query_pre_attn_scalar": config["hidden_size"] // heads if is_27b else config["head_dim"],
    }


def _rope_scaling(meta: _Metadata, factors: np.ndarray | None, head_dim: int) -> dict[str, Any] | None:
    """None, or a dict with "rope_type"; the type "factors" divides the inverse frequencies element by element."""
    if factors is not None:
        if factors.size != head_dim // 2:
            raise WeightsError(f"{meta.path}: rope_freqs.weight has {factors.size} factors for heads of {head_dim}")
        return {"rope_type": "factors", "factors": factors.reshape(-1).tolist()}
    kind = meta.get("rope.scaling.type")
    if kind is None and meta.get("rope.scale_linear") is not None:  # the key of older files
        return {"rope_type": "linear", "factor": meta.number("rope.scale_linear")}
    if kind is None or str(kind) == "none":
        return None
    if str(kind) == "linear":
        return {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    if str(kind) != "yarn":
        raise WeightsError(f"{meta.path}: rope scaling {kind!r} is not supported; supported are none, linear and yarn")
    factor = meta.number("rope.scaling.factor")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if meta.get("rope.scaling.attn_factor") is not None:
        # llama.cpp multiplies it with the factor of the YaRN paper (section 3.4), Hugging Face states the product
        scaling["attention_factor"] = meta.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return scaling


def _token_id(pairs: dict[str, Any], kind: str) -> int | None:
    value = pairs.get(f"tokenizer.ggml.{kind}_token_id")
    return value if type(value) is int else None


def generation_config_from_metadata(pairs: dict[str, Any]) -> dict[str, Any]:
    """eos_token_id lists every token that ends an answer: end of text, of a turn, of a message."""
    ends = [_token_id(pairs, kind) for kind in ("eos", "eot", "eom")]
    tokens, kinds = pairs.get("tokenizer.ggml.tokens"), pairs.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        ends += [i for i, token in enumerate(tokens) if token in _TURN_ENDS and kinds[i] == _CONTROL_TOKEN]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    if (bos := _token_id(pairs, "bos")) is not None:
        config["bos_token_id"] = bos
    return {key: value for key, value in config.items() if value != []}
