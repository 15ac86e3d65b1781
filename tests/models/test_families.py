"""From config.json to the settings of the decoder: each family, both rope conventions, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from noria.errors import WeightsError
from noria.models.config import DecoderConfig
from noria.models.registry import ARCHITECTURES, build_model
from noria.nn.param import Param, is_param
from noria.nn.rope import make_rope

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
REMOVED = object()


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not REMOVED}


def parse(name: str, **changes: Any) -> DecoderConfig:
    return build_model(config_of(name, **changes)).config


def refused(message: str, name: str, **changes: Any) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        parse(name, **changes)
    assert "\n" not in str(caught.value)


def test_llama():
    c = parse("llama")
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers) == (192, 32, 80, 2)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.attention_scale) == (4, 2, 16, 0.25)
    assert (c.max_position_embeddings, c.norm_epsilon, c.tie_word_embeddings) == (256, 0.02, True)
    assert c.windows == (None, None)
    assert c.layer_rope == (0, 0)
    assert c.activation == "silu"
    assert [c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm, c.post_norms] == [False] * 5
    assert (c.norm_offset, c.embedding_scale, c.attention_soft_cap, c.final_soft_cap) == (0.0, 1.0, None, None)


def test_llama_defaults():
    """What old files leave out: heads all alike, their size from the hidden size, an untied head."""
    keys = "num_key_value_heads head_dim tie_word_embeddings rms_norm_eps hidden_act attention_bias rope_parameters"
    c = parse("llama", **dict.fromkeys(keys.split(), REMOVED))
    assert (c.num_kv_heads, c.head_dim, c.tie_word_embeddings, c.norm_epsilon) == (4, 8, False, 1e-6)
    assert c.activation == "silu"
    assert c.ropes == (make_rope(8, 10_000.0, None, 256),)


def test_llama_biases():
    c = parse("llama-bias-linear-rope")
    assert c.qkv_bias
    assert c.output_bias
    assert c.mlp_bias
    assert not c.tie_word_embeddings
    assert c.num_kv_heads == c.num_heads


@pytest.mark.parametrize("name", ["llama-llama3-rope", "gemma3-linear-rope"])
def test_both_rope_conventions_mean_the_same(name: str):
    assert "rope_parameters" in config_of(name)
    assert "rope_scaling" in config_of(name + "-legacy")
    assert parse(name) == parse(name + "-legacy")
    assert parse(name).ropes != parse(name.partition("-")[0]).ropes


def test_older_key_for_the_rope_type():
    scaling = {"type": "linear", "factor": 4.0}
    c = parse("llama", rope_parameters=REMOVED, rope_theta=10_000.0, rope_scaling=scaling)
    assert c.ropes == (make_rope(16, 10_000.0, {"rope_type": "linear", "factor": 4.0}, 256),)
    assert c.ropes != parse("llama").ropes


def test_rope_theta():
    new = parse("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    old = parse("llama", rope_parameters=REMOVED, rope_theta=5e5)
    assert new.ropes == old.ropes == (make_rope(16, 5e5, None, 256),)


def test_mistral():
    assert parse("mistral").windows == (None, None)
    assert parse("mistral").head_dim == 12
    assert parse("mistral-window").windows == (16, 16)
    assert parse("mistral-window", sliding_window=REMOVED).windows == (None, None)


def test_qwen2():
    c = parse("qwen2")
    assert c.qkv_bias
    assert not c.output_bias
    assert parse("qwen2-legacy") == c
    assert c.windows == (None, None)  # use_sliding_window is off, whatever sliding_window says
    windowed = parse("qwen2-untied-window")
    assert windowed.windows == (None, 16, 16)
    assert not windowed.tie_word_embeddings
    assert parse("qwen2-untied-window", layer_types=REMOVED).windows == (None, 16, 16)  # from max_window_layers
    assert parse("qwen2-untied-window", layer_types=REMOVED, max_window_layers=REMOVED).windows == (None,) * 3
    assert parse("qwen2-untied-window", layer_types=["sliding_attention"] * 3).windows == (16,) * 3


def test_qwen3_moe():
    c = parse("qwen3-moe")
    assert c.moe is not None
    assert (c.moe.experts, c.moe.size, c.moe.first_layer, c.num_dense_layers) == (8, 24, 0, 0)
    routing = c.moe.routing
    assert (routing.experts, routing.chosen, routing.scoring, routing.renormalize) == (8, 3, "softmax", True)
    assert c.qk_norm
    assert parse("qwen3-moe", num_local_experts=REMOVED, num_experts=8) == c  # as transformers 4 wrote it
    assert parse("qwen3-moe-dense-first").num_dense_layers == 1
    assert parse("qwen3-moe", mlp_only_layers=[0, 1]).moe is None
    refused(r"mlp_only_layers \[1\] .* dense layers must come first", "qwen3-moe", mlp_only_layers=[1])
    refused("decoder_sparse_step 2 is not supported", "qwen3-moe", decoder_sparse_step=2)
    refused(r"num_experts_per_tok \(9\) exceeds the 8 experts", "qwen3-moe", num_experts_per_tok=9)


def test_deepseek_v3():
    c = parse("deepseek-v3")
    assert c.mla is not None
    assert c.moe is not None
    mla, moe, routing = c.mla, c.moe, c.moe.routing
    assert (mla.query_rank, mla.latent, mla.plain, mla.rotated, mla.value) == (24, 32, 12, 16, 20)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.cache_planes) == (4, 1, 48, 1)
    assert (moe.experts, moe.size, moe.first_layer, moe.shared_size, moe.has_correction) == (8, 24, 1, 24, True)
    assert (routing.groups, routing.chosen_groups, routing.group_score, routing.scale) == (4, 2, "best two", 2.5)
    assert (routing.scoring, routing.renormalize) == ("sigmoid", True)
    stretched = 0.1 * math.log(4) + 1
    assert c.attention_scale == pytest.approx(28**-0.5 * stretched**2)
    assert c.ropes[0].magnitude == 1.0
    assert mla.interleaved
    assert not parse("deepseek-v3", rope_interleave=False).mla.interleaved
    assert parse("deepseek-v3", topk_method="noaux_tc", scoring_func="sigmoid") == c  # as the authors write it
    refused("topk_method greedy with scoring_func sigmoid is not", "deepseek-v3", topk_method="greedy")
    refused("do not give num_experts_per_tok", "deepseek-v3", topk_group=1)
    refused("attention_bias, mlp_bias and moe_layer_freq are not", "deepseek-v3", attention_bias=True)


def test_deepseek_v2():
    c = parse("deepseek-v2")
    assert c.mla is not None
    assert c.moe is not None
    assert c.mla.query_rank is None
    assert (c.moe.shared_size, c.moe.has_correction, c.moe.routing.scoring) == (48, False, "softmax")
    assert (c.moe.routing.groups, c.moe.routing.group_score, c.moe.routing.renormalize) == (4, "best", False)
    assert c.attention_scale == 28**-0.5
    assert parse("deepseek-v2", topk_method="greedy").moe.routing.groups == 1
    assert parse("deepseek-v2", first_k_dense_replace=3).moe is None
    refused("topk_method noaux_tc with scoring_func softmax is not", "deepseek-v2", topk_method="noaux_tc")
    refused("norm_topk_prob is not supported", "deepseek-v2", norm_topk_prob=True)


def test_mixtral():
    c = parse("mixtral")
    assert c.moe is not None
    assert (c.moe.experts, c.moe.size, c.moe.first_layer) == (4, 40, 0)
    assert (c.moe.routing.chosen, c.moe.routing.renormalize) == (2, True)
    assert c.windows == (None, None)
    assert parse("mixtral", sliding_window=16).windows == (16, 16)


def test_qwen3():
    c = parse("qwen3")
    assert c.qk_norm
    assert not c.qkv_bias
    assert c.head_dim == 20
    assert c.attention_scale == 20**-0.5
    assert parse("qwen3", head_dim=REMOVED).head_dim == 128  # not hidden size / heads
    assert parse("qwen3", head_dim=REMOVED).attention_scale == 128**-0.5
    biased = parse("qwen3", attention_bias=True)
    assert biased.qkv_bias
    assert biased.output_bias


def test_gemma3():
    c = parse("gemma3")
    assert c.windows == (16, 16, None, 16, 16, None, 16)
    assert c.layer_rope == (1, 1, 0, 1, 1, 0, 1)
    assert c.ropes == (make_rope(24, 100_000.0, None, 256), make_rope(24, 1000.0, None, 256))
    assert c.attention_scale == 20**-0.5
    assert (c.norm_offset, c.embedding_scale, c.activation) == (1.0, 32**0.5, "gelu_tanh")
    assert c.qk_norm
    assert c.post_norms
    assert c.tie_word_embeddings
    assert (c.attention_soft_cap, c.final_soft_cap) == (None, None)


def test_gemma3_defaults_and_pattern():
    c = parse("gemma3-linear-rope-legacy", sliding_window_pattern=REMOVED, rope_theta=REMOVED, rope_scaling=REMOVED)
    assert c.windows == (16, 16, 16, 16, 16, None, 16)
    assert c.ropes[0] == make_rope(24, 1_000_000.0, None, 256)
    c = parse("gemma3-linear-rope-legacy", rope_local_base_freq=REMOVED)
    assert c.ropes[1] == make_rope(24, 10_000.0, None, 256)  # never scaled
    absent = dict.fromkeys(("head_dim", "query_pre_attn_scalar", "tie_word_embeddings"), REMOVED)
    c = parse("gemma3", **absent)
    assert (c.head_dim, c.attention_scale, c.tie_word_embeddings) == (256, 1 / 16, True)


def test_gemma3_soft_caps():
    c = parse("gemma3", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (c.attention_soft_cap, c.final_soft_cap) == (50.0, 30.0)


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(name: str, key: str):
    refused(f"config.json: {key} must be", name, **{key: REMOVED})


def test_missing_window_is_named():
    refused("sliding_window must be", "gemma3", sliding_window=REMOVED)


@pytest.mark.parametrize("value", ["32", True, [32], {}, 0, -1, 1.5, float("nan"), float("inf")], ids=str)
def test_wrong_value_is_named(value: Any):
    refused("config.json: hidden_size must be a", "llama", hidden_size=value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu2"}, "hidden_act relu2 is not supported; supported: silu"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_act silu is not supported; supported: gelu_pytorch_tanh"),
        ("llama", {"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of 3"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ],
)
def test_refused_settings(name: str, changes: dict, message: str):
    refused(message, name, **changes)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "nonsense"])
def test_unsupported_rope_scaling(kind: str):
    message = f"rope scaling {kind} is not supported; supported: default, linear, llama3, yarn"
    refused(message, "llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    refused(message, "llama-llama3-rope-legacy", rope_scaling={"rope_type": kind, "factor": 2.0})
    nested = {"full_attention": {"rope_type": kind, "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    refused(message, "gemma3", rope_parameters=nested)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope parameters lack factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope parameters lack low_freq_factor"),
        ("llama", {"rope_parameters": "linear"}, "rope_parameters must be an object"),
        ("llama-llama3-rope-legacy", {"rope_scaling": [8.0]}, "rope_scaling must be an object"),
        ("gemma3", {"rope_parameters": {"full_attention": 5}}, "full_attention must be an object"),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
        ("llama-llama3-rope-legacy", {"rope_theta": "big"}, "rope_theta must be a number"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_broken_rope(name: str, changes: dict, message: str):
    refused(message, name, **changes)


@pytest.mark.parametrize("name", ["gemma3", "qwen2-untied-window", "qwen3"])
@pytest.mark.parametrize("types", [["full_attention"], ["nonsense"] * 3, "full_attention", 5, [None] * 7, [["x"]] * 3])
def test_nonsense_layer_types(name: str, types: Any):
    refused("layer_types must be . of .*full_attention", name, layer_types=types)


@pytest.mark.parametrize("names", [["MambaForCausalLM"], ["GPT2LMHeadModel", "Other"], "MambaForCausalLM"])
def test_unsupported_architecture(names: Any):
    first = names if isinstance(names, str) else ", ".join(names)
    refused(f"architecture {first} is not supported; supported: LlamaForCausalLM, ", "llama", architectures=names)


def test_no_architecture():
    for nothing in (REMOVED, [], None):
        refused(r"architecture \(none given\) is not supported", "llama", architectures=nothing)


def test_the_first_architecture_that_is_known_counts():
    assert parse("llama", architectures=["MyOwnForCausalLM", "LlamaForCausalLM"]) == parse("llama")


def test_every_architecture_has_a_golden_model():
    found = {config_of(path.parent.name)["architectures"][0] for path in GOLDEN.glob("*/config.json")}
    assert found == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["llama", "llama-bias-linear-rope", "qwen2", "qwen3", "gemma3"])
def test_declaration_has_what_the_family_has(name: str):
    model = build_model(config_of(name))
    c, declared = model.config, model.declaration()
    assert (declared.head is None) == c.tie_word_embeddings
    matrices, norms = declared.matrices, declared.norms
    assert (matrices.q_bias is None) == (not c.qkv_bias)
    assert (matrices.o_bias is None) == (not c.output_bias)
    assert (matrices.up_bias is None) == (not c.mlp_bias)
    assert (norms.k is None) == (not c.qk_norm)
    assert (norms.mlp_post is None) == (not c.post_norms)
    params: list[Param] = jax.tree.leaves(declared, is_leaf=is_param)
    assert all(param.shape[0] == c.num_layers for param in params if param.stacked)
    assert len({param.source for param in params}) == len(params)
    assert matrices.k.shape == (c.num_layers, c.num_kv_heads * c.head_dim, c.hidden_size)
