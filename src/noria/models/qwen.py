"""Qwen2, Qwen2.5 (a bias on queries, keys and values), Qwen3 (norms on queries and keys instead) and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.errors import WeightsError
from noria.models.config import DecoderConfig, Keys, Moe, dense_config, moe_routing


def qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    return dense_config(config, activations={"silu": "silu"}, qkv_bias=True, windows=_windows(Keys(config)))


def qwen3(config: Mapping[str, Any], moe: Moe | None = None) -> DecoderConfig:
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
        moe=moe,
    )


def qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    experts = keys.integer("num_experts", keys.get("num_local_experts"))
    routing = moe_routing(keys, experts, renormalize=bool(keys.get("norm_topk_prob", False)))
    dense, step = keys.get("mlp_only_layers", []), keys.integer("decoder_sparse_step", 1)
    if dense != list(range(len(dense))) or step != 1:
        raise WeightsError(
            f"config.json: mlp_only_layers {dense} with decoder_sparse_step {step} is not supported; dense layers must "
            "come first, and all others have experts"
        )
    if len(dense) >= keys.integer("num_hidden_layers"):
        return qwen3(config)
    return qwen3(
        config,
        Moe(routing=routing, experts=experts, size=keys.integer("moe_intermediate_size"), first_layer=len(dense)),
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
