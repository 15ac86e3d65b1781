"""Llama 2 and 3.x, SmolLM2, and Mistral (Llama with a sliding window on every layer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.models.config import DecoderConfig, Keys, dense_config


def llama(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return dense_config(
        config,
        activations={"silu": "silu"},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )


def mistral(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    window = keys.integer("sliding_window") if keys.get("sliding_window") else None
    return dense_config(config, activations={"silu": "silu"}, windows=(window,) * keys.integer("num_hidden_layers"))
