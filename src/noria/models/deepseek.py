"""DeepSeek-V2 and V3: latent attention, and experts that are chosen within groups, beside those of all tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from noria.errors import WeightsError
from noria.models.config import DecoderConfig, Keys, Mla, Moe, dense_config, moe_routing
from noria.nn.routing import Routing


def deepseek_v2(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    method, scoring = keys.get("topk_method", "greedy"), keys.get("scoring_func", "softmax")
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise WeightsError(
            f"config.json: topk_method {method} with scoring_func {scoring} is not supported; supported are greedy and "
            "group_limited_greedy with softmax"
        )
    if keys.get("norm_topk_prob"):
        raise WeightsError("config.json: norm_topk_prob is not supported for DeepSeek-V2")
    groups = _groups(keys) if method == "group_limited_greedy" else {}
    return _deepseek(config, _routing(keys, renormalize=False, **groups), has_correction=False, interleaved=True)


def deepseek_v3(config: Mapping[str, Any]) -> DecoderConfig:
    keys = Keys(config)
    method, scoring = keys.get("topk_method", "noaux_tc"), keys.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise WeightsError(
            f"config.json: topk_method {method} with scoring_func {scoring} is not supported; supported is noaux_tc "
            "with sigmoid"
        )
    routing = _routing(
        keys,
        renormalize=bool(keys.get("norm_topk_prob", True)),
        scoring="sigmoid",
        group_score="best two",
        **_groups(keys),
    )
    interleaved = bool(keys.get("rope_interleave", True))
    return _deepseek(config, routing, has_correction=True, interleaved=interleaved)


def _routing(keys: Keys, **own: Any) -> Routing:
    scale = keys.number("routed_scaling_factor", 1.0)
    return moe_routing(keys, keys.integer("n_routed_experts"), scale=scale, **own)


def _groups(keys: Keys) -> dict[str, int]:
    experts, groups, chosen = (keys.integer(name) for name in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups or chosen > groups or chosen * (experts // groups) < keys.integer("num_experts_per_tok"):
        raise WeightsError(
            f"config.json: of {experts} experts in n_group ({groups}) groups, topk_group ({chosen}) do not give "
            f"num_experts_per_tok ({keys.integer('num_experts_per_tok')})"
        )
    return {"groups": groups, "chosen_groups": chosen}


def _deepseek(config: Mapping[str, Any], routing: Routing, *, has_correction: bool, interleaved: bool) -> DecoderConfig:
    keys = Keys(config)
    if keys.get("attention_bias") or keys.get("mlp_bias") or keys.integer("moe_layer_freq", 1) != 1:
        raise WeightsError("config.json: attention_bias, mlp_bias and moe_layer_freq are not supported for DeepSeek")
    mla = Mla(
        query_rank=keys.integer("q_lora_rank") if keys.get("q_lora_rank") else None,
        latent=keys.integer("kv_lora_rank"),
        plain=keys.integer("qk_nope_head_dim"),
        rotated=keys.integer("qk_rope_head_dim"),
        value=keys.integer("v_head_dim"),
        interleaved=interleaved,
    )
    size, layers = keys.integer("moe_intermediate_size"), keys.integer("num_hidden_layers")
    first = min(int(keys.number("first_k_dense_replace", 0)), layers)
    moe = Moe(
        routing=routing,
        experts=routing.experts,
        size=size,
        first_layer=first,
        shared_size=size * int(keys.number("n_shared_experts", 0)),
        has_correction=has_correction,
    )
    return dense_config(
        {**config, "num_key_value_heads": None},
        activations={"silu": "silu"},
        head_dim=mla.latent + mla.rotated,
        num_kv_heads=1,
        ropes=(keys.rope(mla.rotated),),
        attention_scale=(mla.plain + mla.rotated) ** -0.5 * _yarn_scale(keys),
        mla=mla,
        moe=moe if first < layers else None,
    )


def _yarn_scale(keys: Keys) -> float:
    """What the authors multiply scores with where YaRN stretches the positions."""
    rope = Keys(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    is_plain = (rope.get("rope_type") or rope.get("type") or "default") == "default"
    all_dim = 0.0 if is_plain else rope.number("mscale_all_dim", 0.0)
    factor = rope.number("factor", 1.0)
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if all_dim and factor > 1 else 1.0
