"""A GGUF file as a bfloat16 Hugging Face folder, so that engines that cannot read the one run the same weights.

Run: python benchmarks/to_hf.py MODEL.gguf FOLDER
The folder has config.json, generation_config.json, model.safetensors and, for the two kinds of vocabulary that GGUF
files have, tokenizer.json. Tensors get the names and conventions of Hugging Face: rotary pairs are in halves, and
Gemma's norm weights are without the 1 that the file adds to them.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from noria.weights.checkpoint import Checkpoint, open_checkpoint
from noria.weights.gguf_file import read_metadata

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def convert(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(source) as checkpoint:
        config = {key: value for key, value in checkpoint.config.items() if value is not None}
        if config.get("rope_scaling", {}).get("rope_type") == "factors":
            raise SystemExit(f"{source}: Hugging Face has no name for the kind of rope scaling in this file")
        config["dtype"] = config["torch_dtype"] = "bfloat16"
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", checkpoint.generation_config)
        write_tensors(checkpoint, folder / "model.safetensors")
    write_tokenizer(read_metadata(source), folder)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def write_tensors(checkpoint: Checkpoint, path: Path) -> None:
    """The safetensors format: the header's length (64 bits), a JSON header with the place of each tensor, the data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(checkpoint.names()):
        shape = checkpoint.shape(name)
        end = offset + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in sorted(checkpoint.names()):
            values = np.empty(checkpoint.shape(name), ml_dtypes.bfloat16)
            checkpoint.read(name, values)
            file.write(values.tobytes())


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    read = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
    texts = [text if isinstance(text, str) else text.decode("utf-8") for text in read("tokens")]
    kinds = [int(kind) for kind in read("token_type")]
    if read("model") == "gpt2":
        library = _byte_level(texts, read)
    else:
        library = _sentence_piece(texts, kinds, read)
    special = [
        AddedToken(text, special=True, normalized=False)
        for text, kind in zip(texts, kinds)
        if kind in (_CONTROL, _UNKNOWN)
    ]
    library.add_special_tokens(special)
    library.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in zip(texts, kinds) if kind == _USER_DEFINED]
    )
    library.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": read(f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    config: dict[str, Any] = {key: texts[token] for key, token in named.items() if token is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["add_bos_token"] = bool(read("add_bos_token", read("model") != "gpt2"))
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)


def _byte_level(texts: list[str], read: Any) -> Tokenizer:
    from tokenizers import Regex, pre_tokenizers

    from noria.text.pretokenizers import find_pre_tokenizer

    split = find_pre_tokenizer(read("pre", "default"))
    if split is None:
        raise SystemExit(f"the pre-tokenizer {read('pre')!r} is unknown")
    merges = [
        tuple(text.split(" ", 1)) for text in (m if isinstance(m, str) else m.decode("utf-8") for m in read("merges"))
    ]
    vocabulary = {text: token for token, text in enumerate(texts)}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    return library


def _sentence_piece(texts: list[str], kinds: list[int], read: Any) -> Tokenizer:
    """The scores of a SentencePiece vocabulary as merges: a pair merges the earlier, the better its piece."""
    vocabulary = {text: token for token, text in enumerate(texts)}
    scores = [float(score) for score in read("scores")]
    ranked = []
    for text, token in vocabulary.items():
        if kinds[token] == _NORMAL and len(text) > 1:
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocabulary and right in vocabulary:
                    ranked.append((-scores[token], vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    library = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=texts[read("unknown_token_id", 0)],
        )
    )
    steps = [normalizers.Prepend(_SPACE)] if read("add_space_prefix", True) else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if steps else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    convert(args.model, args.folder)


if __name__ == "__main__":
    main()
