"""Folders as transformers reads them (ids, text and chat prompts), GGUF files as llama.cpp reads them (ids)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.text.chat import encode_chat, render_chat
from noria.text.pretokenizers import pre_tokenizer_names
from noria.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.oracle

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    " the  he\n\t",
    "emoji 😀 é e\u0301 日本語",
    "<|im_start|>a<|im_end|>",
    "</s>x",
]
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi é"},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, "é<"]}}]},
]
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    <{{ message.role }}>
    {% if message.tool_calls %}
{{ message.tool_calls | tojson(indent=2) }} {{ message.tool_calls | tojson }}
    {% endif %}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
{{ eos_token }}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<assistant>{{ extra_word }}{% endif %}
"""


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_folders_read_like_transformers(
    kind: str, flags: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"} if kind == "byte_level" else {}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | names | flags
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
        if not flags:
            assert tokenizer.encode(text) == oracle.encode(text)
    for tools in (None, [{"type": "function", "function": {"name": "f", "description": "<é>"}}]):
        for prompt in (False, True):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "extra_word": "x"}
            expected = oracle.apply_chat_template(MESSAGES, tokenize=False, **options)
            assert render_chat(tokenizer, MESSAGES, **options) == expected
            ids = oracle.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **options)
            assert encode_chat(tokenizer, MESSAGES, **options) == ids


GOLDEN = Path(__file__).parent.parent / "golden" / "text" / "smollm2-135m-instruct.json"
HYPERPARAMETERS = {  # what llama.cpp wants to see even where it loads the vocabulary only
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 1,
}


def compare_with_llama_cpp(path: Path, texts: list[str]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    oracle = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    tokenizer = load_tokenizer(path)
    for text in texts:
        for special in (True, False):
            expected = oracle.tokenize(text.encode("utf-8"), add_bos=special, special=True)
            assert tokenizer.encode(text, add_special_tokens=special) == expected, repr(text)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [case["text"] for case in json.loads(GOLDEN.read_text(encoding="ascii"))["cases"]]


@pytest.mark.parametrize("pre", pre_tokenizer_names())
def test_pre_tokenizers_cut_like_llama_cpp(
    pre: str, texts: list[str], byte_level_metadata: dict[str, Any], write_gguf: Callable[..., Path]
) -> None:
    values = byte_level_metadata | HYPERPARAMETERS | {"pre": pre, "bos_token_id": 1}
    compare_with_llama_cpp(write_gguf(values), texts)


@pytest.mark.parametrize("change", [{}, {"add_space_prefix": True}, {"add_eos_token": True}])
def test_sentence_piece_merges_like_llama_cpp(
    change: dict[str, Any],
    texts: list[str],
    sentence_piece_metadata: dict[str, Any],
    write_gguf: Callable[..., Path],
) -> None:
    values = sentence_piece_metadata | HYPERPARAMETERS | change
    # scores in groups of equal ones, so that the order of ties matters
    values["scores"] = [score // 4 for score in values["scores"]]
    # llama.cpp looks for tokens of spaces before it writes spaces as \u2581, SentencePiece and noria after
    compare_with_llama_cpp(write_gguf(values), [text for text in texts if "\u2581" not in text])
