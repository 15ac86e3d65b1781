"""Qwen2, Qwen2.5 (a bias on queries, keys and values) and dense Qwen3 (norms on queries and keys instead)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.models.config import DecoderConfig, Keys, dense_config


def qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    return dense_config(config, activations={"silu": "silu"}, qkv_bias=True, windows=_windows(Keys(config)))


def qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    keys, bias = Keys(config), bool(config.get("attention_bias"))
    return dense_config(
        config,
        activations={"silu": "silu"},
        head_dim=keys.integer("head_dim", 128),
        attention_scale=keys.integer("head_dim", 128) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_windows(keys),
    )


def _windows(keys: Keys) -> tuple[int | None, ...]:
    """Sliding windows are off unless use_sliding_window; layers below max_window_layers stay full."""
    layers = keys.integer("num_hidden_layers")
    types = keys.layer_types(("full_attention", "sliding_attention"))
    if not keys.get("use_sliding_window", False) or not keys.get("sliding_window"):
        return (None,) * layers
    window = keys.integer("sliding_window")
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = int(keys.number("max_window_layers", 28))
    return tuple(window if layer >= first else None for layer in range(layers))
