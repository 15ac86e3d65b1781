"""A GGUF file and the folder made from it are the same model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import to_hf

from noria.models.registry import build_model
from noria.text.tokenizer import load_tokenizer
from noria.weights.checkpoint import open_checkpoint

HIDDEN, HEADS, HEAD_DIM, FFN = 32, 2, 16, 48
TEXTS = ["the river", " the  mill\nturns é", "<end>the", ""]
SPACE = "\u2581"
WORDS = ["th", "the", f"{SPACE}the", f"{SPACE}t", "ri", "er", "mi", "ll", f"{SPACE}m", f"{SPACE}mi", f"{SPACE}mill"]


def write(path: Path, architecture: str) -> Path:
    """A model of one layer with random weights and a small tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 8,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    count = sentence_piece(writer) if architecture == "gemma3" else byte_level(writer)
    q, kv = HEADS * HEAD_DIM, HEAD_DIM
    shapes = {
        "token_embd": (count, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (q, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, q),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    if architecture == "gemma3":
        shapes |= {f"blk.0.{name}": (HEAD_DIM,) for name in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("post_attention_norm", "post_ffw_norm")}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(writer: gguf.GGUFWriter) -> int:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "r i", "e r"]
    tokens = ["<start>", "<end>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    return len(tokens)


def sentence_piece(writer: gguf.GGUFWriter) -> int:
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz<>"]
    tokens = ["<pad>", "<end>", "<start>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *WORDS]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1] * (len(letters) + len(WORDS)))
    # Of two pieces the one with the higher score is merged first; letters come last.
    writer.add_token_scores([0.0] * 260 + [-1000.0] * len(letters) + [-float(rank) for rank in range(len(WORDS))])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    return len(tokens)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_same_model(tmp_path: Path, architecture: str) -> None:
    source, folder = write(tmp_path / "m.gguf", architecture), tmp_path / "hf"
    to_hf.convert(source, folder)
    with open_checkpoint(source) as old, open_checkpoint(folder) as new:
        assert new.native_dtype == "bfloat16"
        assert new.names() == old.names()
        for name in sorted(old.names()):
            values = [np.empty(checkpoint.shape(name), np.float32) for checkpoint in (old, new)]
            old.read(name, values[0])
            new.read(name, values[1])
            np.testing.assert_array_equal(values[0].astype(ml_dtypes.bfloat16).astype(np.float32), values[1])
        assert build_model(new.config).config == build_model(old.config).config
        assert new.generation_config == old.generation_config
    before, after = load_tokenizer(source), load_tokenizer(folder)
    for text in TEXTS:
        assert after.encode(text) == before.encode(text), text
    tokens = list(range(before.vocab_size))
    assert after.decode(tokens) == before.decode(tokens)
    assert after.eos_token_ids == before.eos_token_ids
    assert (after.chat_template is None) == (architecture == "gemma3")


def test_gemmas_norms_are_stored_without_the_one(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "gemma3")
    reader = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source).tensors}
    to_hf.convert(source, tmp_path / "hf")
    with open_checkpoint(tmp_path / "hf") as folder:
        values = np.empty(HIDDEN, np.float32)
        folder.read("model.norm.weight", values)
    np.testing.assert_allclose(values, reader["output_norm.weight"] - 1, rtol=0.01, atol=0.01)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
