"""Gemma 3, text only: alternating windows, two rope bases, norms on both sides, scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.errors import WeightsError
from noria.models.config import DecoderConfig, Keys, dense_config
from noria.nn.rope import Rope, make_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"


def gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    layers, window, hidden = (
        keys.integer("num_hidden_layers"),
        keys.integer("sliding_window"),
        keys.integer("hidden_size"),
    )
    head_dim = keys.integer("head_dim", 256)
    types = keys.layer_types((_SLIDING, _FULL))
    if types is None:
        pattern = keys.integer("sliding_window_pattern", 6)
        types = [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]
    if keys.get("use_bidirectional_attention"):
        raise WeightsError("config.json: use_bidirectional_attention is not supported: this model is an encoder")
    return dense_config(
        config,
        activations={"gelu_pytorch_tanh": "gelu_tanh"},
        head_dim=head_dim,
        tie_word_embeddings=bool(keys.get("tie_word_embeddings", True)),
        ropes=(_global_rope(keys, head_dim), _local_rope(keys, head_dim)),
        layer_rope=tuple(int(kind == _SLIDING) for kind in types),
        windows=tuple(window if kind == _SLIDING else None for kind in types),
        attention_scale=keys.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bool(keys.get("attention_bias", False)),
        output_bias=bool(keys.get("attention_bias", False)),
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=hidden**0.5,
        attention_soft_cap=keys.get("attn_logit_softcapping"),
        final_soft_cap=keys.get("final_logit_softcapping"),
    )


def _global_rope(keys: Keys, head_dim: int) -> Rope:
    return keys.rope(head_dim, _FULL, theta=1_000_000.0)


def _local_rope(keys: Keys, head_dim: int) -> Rope:
    """Sliding layers have their own base and, in the older config convention, never a scaling."""
    if keys.get("rope_parameters") is not None:
        return keys.rope(head_dim, _SLIDING)
    return make_rope(
        head_dim, keys.number("rope_local_base_freq", 10_000.0), None, keys.integer("max_position_embeddings")
    )
