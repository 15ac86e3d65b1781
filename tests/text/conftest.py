"""Small tokenizers, written as the files real models come with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it? They'll say we've been here.",
    "def f(x):\n    return x + 1\n\n\nfor i in range(10):\n        print(i)\n",
    "Numbers 123 4567 89 and 2024; 日本語のテキスト, Ελληνικά, emoji 😀😀🎉 and e\u0301 accents é.",
]
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer of the `tokenizers` package with merges learnt from CORPUS."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROLS),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\u00e9\u00e9", normalized=False)])
    return library


@pytest.fixture(scope="session")
def byte_level_folder(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer as a model folder."""
    folder = tmp_path_factory.mktemp("byte_level")
    byte_level.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "unk_token": {"content": "<|endoftext|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level: Tokenizer) -> dict[str, Any]:
    """The same tokenizer as the values of a GGUF file's keys."""
    model = json.loads(byte_level.to_str())["model"]
    tokens = sorted(byte_level.get_vocab(), key=byte_level.token_to_id)
    special = dict.fromkeys(CONTROLS, CONTROL) | {"<think>": USER_DEFINED, "\u00e9\u00e9": USER_DEFINED}
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [special.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": 2,
    }


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# pieces with scores as SentencePiece makes them: merged pieces first come first, then single characters
MERGED = [
    "\u2581t",
    "he",
    "\u2581the",
    "in",
    "\u2581a",
    "er",
    "\u2581\u2581",
    "ab",
    "abc",
    "bc",
    "cab",
    "\u2581abc",
    "日本",
]
SINGLE = "\u2581etaoinshrdlcumwfgypbvkxjqz.,日"


@pytest.fixture(scope="session")
def sentence_piece_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary in the manner of Llama 2 and Gemma, as the values of a GGUF file's keys."""
    control = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    byte = [f"<0x{value:02X}>" for value in range(256)]
    literal = ["\n\n", "\n\n\n", "  ", "    ", "<b>", "<bold>"]
    tokens = [*control, *byte, *literal, *MERGED, *SINGLE]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED] * len(literal)
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    normal = kinds.count(NORMAL)
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [-1000.0] * (len(tokens) - normal) + [-float(rank) for rank in range(normal)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
    }


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file without tensors; the keys get the prefix tokenizer.ggml. unless they have a dot."""

    def write(values: dict[str, Any], name: str = "model.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in values.items():
            _add(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: bool | int | str | Sequence[Any]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the manner of Llama 2: merges on ▁ text, byte fallback, a space before every text, <s> before it."""
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{value:02X}>" for value in range(256)),
        *SINGLE,
        "he",
        "\u2581t",
        "\u2581the",
    ]
    vocabulary = {text: token for token, text in enumerate(texts)}
    merges = [("h", "e"), ("\u2581", "t"), ("\u2581t", "he")]
    library = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.enable_truncation(4)  # as files saved after a training run have it
    library.enable_padding(length=16)
    folder = tmp_path_factory.mktemp("metaspace")
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
