"""A GGUF file looks like the Hugging Face model it was made of: names, order of rows, norms, config."""

import importlib.util
import json

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from model_files import HEAD_DIM, HIDDEN, LAYERS, VOCAB, hf_tensors, read_all, write_gguf

from noria.aot.models import load_config
from noria.config import cache_home
from noria.errors import WeightsError
from noria.models.registry import build_model
from noria.weights.checkpoint import open_checkpoint
from noria.weights.gguf_file import read_header
from noria.weights.packaged import PACKAGED

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_those_of_the_original(tmp_path, architecture):
    tensors = hf_tensors(architecture)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, architecture)) as checkpoint:
        assert checkpoint.names() == set(tensors)
        assert (checkpoint.quantized, checkpoint.native_dtype) == (False, "float32")
        for name, values in read_all(checkpoint).items():
            if architecture == "gemma3" and "norm" in name:  # (w + 1) - 1 may round
                np.testing.assert_allclose(values, tensors[name], rtol=0, atol=3e-7)
            else:
                np.testing.assert_array_equal(values, tensors[name])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_is_that_of_the_original(tmp_path, architecture):
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hf_tensors(architecture), architecture)) as checkpoint:
        config = checkpoint.config
    class_name, model_type = ARCHITECTURES[architecture]
    expected = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": architecture == "qwen2",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    json.dumps(config)  # nothing but plain values
    if architecture == "gemma3":
        assert config["sliding_window"] == 16
        assert config["layer_types"] == ["sliding_attention"] * LAYERS
        assert config["rope_local_base_freq"] == 10000.0
        assert config["query_pre_attn_scalar"] == HEAD_DIM
    else:
        assert "sliding_window" not in config


def test_the_experts_of_qwen3moe(tmp_path):
    tensors = hf_tensors("qwen3moe")
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "qwen3moe", kind="Q8_0")) as checkpoint:
        wanted = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        assert {key: checkpoint.config[key] for key in wanted} == wanted
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        packed = quants.quantize(tensors[name], GGMLQuantizationType.Q8_0)
        assert checkpoint.block_type(name) == "Q8_0"
        np.testing.assert_array_equal(checkpoint.read_blocks(name)[0], packed)
        np.testing.assert_array_equal(read_all(checkpoint)[name], quants.dequantize(packed, GGMLQuantizationType.Q8_0))
        assert checkpoint.block_type("model.layers.1.mlp.gate.weight") is None


def test_mixtral_is_a_llama_with_experts(tmp_path):
    tensors = hf_tensors("mixtral")
    keys = {"llama.expert_count": 3, "llama.expert_used_count": 2, "llama.feed_forward_length": 32}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, keys=keys)) as checkpoint:
        assert checkpoint.config["architectures"] == ["MixtralForCausalLM"]
        assert [checkpoint.config[key] for key in ("num_local_experts", "num_experts_per_tok")] == [3, 2]
        for name, values in read_all(checkpoint).items():
            np.testing.assert_array_equal(values, tensors[name])


def test_experts_of_other_architectures_are_refused(tmp_path):
    keys = {"qwen2.expert_count": 3, "qwen2.expert_used_count": 2}
    path = write_gguf(tmp_path / "m.gguf", hf_tensors("qwen2"), "qwen2", keys=keys)
    assert_refused(path, "mixture of experts of the architecture qwen2 is not supported")


def test_biases_of_llama_follow_their_rows(tmp_path):
    tensors = hf_tensors("llama", biases=True)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors)) as checkpoint:
        assert checkpoint.config["attention_bias"]
        for name, values in read_all(checkpoint).items():
            np.testing.assert_array_equal(values, tensors[name])


def test_an_output_matrix_unties(tmp_path):
    tensors = hf_tensors("qwen3") | {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "qwen3")) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert "lm_head.weight" in checkpoint.names()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_blocks_are_dequantized_in_slices(tmp_path, monkeypatch, kind, dtype):
    tensors = hf_tensors("llama")
    path = write_gguf(tmp_path / "m.gguf", tensors, kind=kind)
    monkeypatch.setattr("noria.weights.gguf.SLICE_ELEMENTS", 3000)  # less than a matrix, more than a head
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.quantized == kind.startswith("Q")
        assert checkpoint.native_dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
        found = read_all(checkpoint, dtype)
    for name, values in tensors.items():
        if values.ndim == 2:  # blocks lie along the columns, so the order of rows does not matter to them
            packed = quants.quantize(values, GGMLQuantizationType[kind])
            values = quants.dequantize(packed, GGMLQuantizationType[kind])
        np.testing.assert_array_equal(found[name], values.astype(dtype))


def test_llama_3_rope_factors(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), raw_tensors={"rope_freqs.weight": factors})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
        assert checkpoint.names() == set(hf_tensors("llama"))
    write_gguf(path, hf_tensors("llama"), raw_tensors={"rope_freqs.weight": factors[1:]})
    assert_refused(path, "rope_freqs.weight has 15 factors for heads of 32")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, expected):
    keys = {f"qwen3.{key}": value for key, value in keys.items()}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hf_tensors("qwen3"), "qwen3", keys=keys)) as checkpoint:
        assert checkpoint.config["rope_scaling"] == expected


def test_end_tokens_include_those_that_end_a_turn(tmp_path):
    keys = {
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>", "<|im_end|>", "<end_of_turn>", "<eom>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 1, 3],  # <end_of_turn> is ordinary text here
        "tokenizer.ggml.eom_token_id": 5,
    }
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), keys=keys)) as checkpoint:
        assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5, 3]}
        assert checkpoint.config["eos_token_id"] == 2


def test_gemma_layers_alternate_in_sixes(tmp_path):
    tensors = {f"model.layers.{i}.input_layernorm.weight": np.ones(HIDDEN, np.float32) for i in range(13)}
    tensors["model.embed_tokens.weight"] = np.ones((VOCAB, HIDDEN), np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors, "gemma3", keys={"gemma3.block_count": 13})
    with open_checkpoint(path) as checkpoint:
        kinds = checkpoint.config["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11]
    assert len(kinds) == 13


def test_gemma_27b_scales_queries_differently(tmp_path):
    tensors = {f"model.layers.{i}.input_layernorm.weight": np.ones(HIDDEN, np.float32) for i in range(62)}
    tensors["model.embed_tokens.weight"] = np.ones((VOCAB, HIDDEN), np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors, "gemma3", keys={"gemma3.block_count": 62})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["query_pre_attn_scalar"] == HIDDEN // 4 != checkpoint.config["head_dim"]


def test_tensors_without_a_name_keep_their_own(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", hf_tensors("llama"), raw_tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    )
    with open_checkpoint(path) as checkpoint:
        assert "blk.0.attn_sinks.weight" in checkpoint.names()


def assert_refused(path, match):
    with pytest.raises(WeightsError, match=match) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_unsupported_architecture_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), keys={"general.architecture": "mamba"})
    assert_refused(
        tmp_path / "m.gguf", "architecture 'mamba'; supported in GGUF files are llama, qwen2, qwen3, qwen3moe, gemma3"
    )


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
        ({"llama.embedding_length": "wide"}, "embedding_length must be a positive integer, not 'wide'"),
        ({"llama.context_length": 0}, "context_length must be a positive integer, not 0"),
        ({"llama.rope.freq_base": -1.0}, "rope.freq_base must be a positive number"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs between layers"),
        ({"llama.expert_count": 8}, "lacks the metadata llama.expert_used_count"),
        ({"llama.attention.value_length": 16}, "not supported"),
        ({"llama.block_count": 2_000_000_000}, "tensors for 2000000000 layers"),
        ({"llama.attention.key_length": 24, "llama.attention.value_length": 24}, "no multiple of the 24 of a head"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "lacks the metadata llama.rope.scaling.factor"),
    ],
)
def test_impossible_metadata_is_named(tmp_path, keys, match):
    assert_refused(write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), keys=keys), match)


def test_equal_values_for_each_layer_are_one_value(tmp_path):
    keys = {"llama.attention.head_count_kv": [2, 2], "llama.expert_count": 0}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), keys=keys)) as checkpoint:
        assert checkpoint.config["num_key_value_heads"] == 2


def test_a_file_without_an_embedding_is_refused(tmp_path):
    tensors = hf_tensors("llama")
    del tensors["model.embed_tokens.weight"]
    assert_refused(write_gguf(tmp_path / "m.gguf", tensors), "no tensor token_embd.weight")


@pytest.mark.parametrize("model", PACKAGED, ids=lambda model: model.name)
def test_a_real_file_is_dequantized_like_the_reference(model):
    path = cache_home() / "models" / model.file_name
    if not path.exists():
        pytest.skip(f"{model.name} is not in the cache; noria pull {model.name} puts it there")
    one_of_each = {info.type: info for info in read_header(path).tensors.values() if info.num_bytes < 2_000_000}
    with open_checkpoint(path) as checkpoint:
        hf_names = {source.info.name: name for name, source in checkpoint._sources.items() if not source.shift}
        compared = 0
        for kind, info in one_of_each.items():
            if info.name not in hf_names:
                continue
            raw = np.fromfile(path, np.uint8, info.num_bytes, offset=info.offset)
            expected = quants.dequantize(raw.reshape(info.shape[0], -1), GGMLQuantizationType[kind])
            found = np.empty(info.shape, np.float32)
            checkpoint.read(hf_names[info.name], found)
            if checkpoint._sources[hf_names[info.name]].interleaved_head:
                head = checkpoint.config["head_dim"]
                expected = expected.reshape(-1, head // 2, 2, info.shape[1]).swapaxes(1, 2)
            np.testing.assert_array_equal(found, expected.reshape(info.shape))
            compared += 1
    assert compared > 0


@pytest.mark.oracle
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_llama_tensors_equal_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.merges": ["t 1"],
        "llama.vocab_size": VOCAB,
        "llama.rope.dimension_count": HEAD_DIM,
    }
    path = write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), kind="Q8_0", keys=keys)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    state = {name: values.float().numpy() for name, values in model.state_dict().items()}
    with open_checkpoint(path) as checkpoint:
        for name, values in read_all(checkpoint).items():
            np.testing.assert_array_equal(values, state[name])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_the_config_of_a_gguf_file(tmp_path, kind: str, dtype: str) -> None:
    """Its blocks are unpacked to bfloat16 on a TPU, as at a start there."""
    path = write_gguf(tmp_path / "model.gguf", hf_tensors("llama"), kind=kind)
    config = load_config(str(path))
    assert config["dtype"] == dtype
    assert build_model(config).config.max_position_embeddings == 256
