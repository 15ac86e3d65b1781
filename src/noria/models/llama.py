"""Llama 2 and 3.x, SmolLM2, Mistral (Llama with a sliding window on every layer) and Mixtral (with experts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.models.config import DecoderConfig, Keys, Moe, dense_config, moe_routing


def llama(config: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return dense_config(
        config,
        activations={"silu": "silu"},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )


def mistral(config: Mapping[str, Any], moe: Moe | None = None) -> DecoderConfig:
    keys = Keys(config)
    window = keys.integer("sliding_window") if keys.get("sliding_window") else None
    windows = (window,) * keys.integer("num_hidden_layers")
    return dense_config(config, activations={"silu": "silu"}, windows=windows, moe=moe)


def mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    experts = keys.integer("num_local_experts")
    routing = moe_routing(keys, experts, renormalize=True)
    return mistral(config, Moe(routing=routing, experts=experts, size=keys.integer("intermediate_size")))
