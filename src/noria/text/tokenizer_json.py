"""Tokenizers from a Hugging Face model folder: tokenizer.json, and the small files beside it.

Encoding is left to the `tokenizers` package. Decoding is our own, from the bytes of each token, because text must come
out token by token; so the kind of vocabulary is read off the decoder that tokenizer.json declares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from noria.errors import WeightsError
from noria.text.bytelevel import ByteAlphabet
from noria.text.library import encoder
from noria.text.spm import SPACE
from noria.text.tokenizer import END_TOKENS, Vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def load_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a model folder.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and
    chat_template.jinja; all but the first may be missing. Raises WeightsError.
    """
    library = _load_library(folder)
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(library, config)
    names = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    added = library.get_added_tokens_decoder()
    special_ids = frozenset(token for token, entry in added.items() if entry.special)
    to_bytes, num_leading_spaces = _decoding(library, folder)
    texts = library.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(texts.values(), default=-1) + 1)
    for text, token in texts.items():
        pieces[token] = added[token].content.encode("utf-8") if token in added else to_bytes(text)
    bos = library.token_to_id(names["bos_token"]) if "bos_token" in names else None
    eos = library.token_to_id(names["eos_token"]) if "eos_token" in names else None
    prefix, suffix = _added_around(library, config, bos, eos)
    return Vocabulary(
        encode_text=encoder(library),
        pieces=pieces,
        special_ids=special_ids,
        bos_token_id=bos,
        eos_token_ids=_ends(folder, eos, library, special_ids),
        prefix=prefix,
        suffix=suffix,
        num_leading_spaces=num_leading_spaces,
        chat_templates=_chat_templates(folder, config),
        special_tokens=names,
    )


def _load_library(folder: Path) -> Library:
    path = folder / "tokenizer.json"
    if not path.exists():
        only = " (only tokenizer.model: save the tokenizer again in the fast format)"
        hint = only if (folder / "tokenizer.model").exists() else ""
        raise WeightsError(f"{folder} has no tokenizer.json{hint}; name another tokenizer with the option tokenizer")
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise WeightsError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    library.no_truncation()  # some files were saved with the lengths of a training run
    library.no_padding()
    return library


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object")
    return value


def _token_text(entry: Any) -> str | None:
    """A special token is written as its text or as an object with the text in "content"."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _add_missing_tokens(library: Library, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json knows, as transformers does, in the order of their ids."""
    entries = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        text = _token_text(entry)
        if text and library.token_to_id(text) is None:
            token = AddedToken(text, special=bool(entry.get("special")), normalized=False)
            (library.add_special_tokens if token.special else library.add_tokens)([token])


def _decoding(library: Library, folder: Path) -> tuple[Callable[[str], bytes], int]:
    """How a token's text becomes bytes, and how many spaces encoding puts before a text."""
    steps = _decoder_steps(library)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return ByteAlphabet().to_bytes, 0
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise WeightsError(
            f"{folder / 'tokenizer.json'} has a decoder of the unsupported kind {' + '.join(sorted(kinds)) or 'none'}; "
            "supported are byte-level BPE and SentencePiece vocabularies"
        )
    replacements = [_replacement(step, folder) for step in steps if step["type"] in ("Replace", "Metaspace")]
    byte_fallback = "ByteFallback" in kinds

    def to_bytes(text: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            text = text.replace(old, new)
        return text.encode("utf-8")

    return to_bytes, max((_stripped_spaces(step) for step in steps), default=0)


def _decoder_steps(library: Library) -> list[dict[str, Any]]:
    if library.decoder is None:
        return []
    decoder = json.loads(library.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replacement(step: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step.get("replacement", SPACE), " "
    if "String" not in step["pattern"]:
        raise WeightsError(f"{folder / 'tokenizer.json'} has a decoder that replaces a pattern, which is not supported")
    return step["pattern"]["String"], step["content"]


def _stripped_spaces(step: Mapping[str, Any]) -> int:
    if step["type"] == "Strip" and step["content"] == " ":
        return step["start"]
    prepends = step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
    return int(prepends)


def _added_around(
    library: Library, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids put before and after a text: the post-processor's, unless tokenizer_config.json says otherwise."""
    plain = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    prefix, suffix = tuple(full[:at]), tuple(full[at + len(plain) :])
    wanted, has = config.get("add_bos_token"), bos in prefix
    if bos is not None and isinstance(wanted, bool) and wanted != has:
        prefix = (bos, *prefix) if wanted else tuple(token for token in prefix if token != bos)
    wanted, has = config.get("add_eos_token"), eos in suffix
    if eos is not None and isinstance(wanted, bool) and wanted != has:
        suffix = (*suffix, eos) if wanted else tuple(token for token in suffix if token != eos)
    return prefix, suffix


def _ends(folder: Path, eos: int | None, library: Library, special_ids: frozenset[int]) -> tuple[int, ...]:
    """Ids that end a text or a turn. generation_config.json is the model's own complete list where it exists."""
    generation, config = _read_json(folder / "generation_config.json"), _read_json(folder / "config.json")
    ends: list[Any] = [eos]
    for source in (generation, config, config.get("text_config") or {}):
        declared = source.get("eos_token_id")
        ends.extend(declared if isinstance(declared, list) else [declared])
    if generation.get("eos_token_id") is None:
        ends.extend(token for text in END_TOKENS if (token := library.token_to_id(text)) in special_ids)
    return tuple(dict.fromkeys(end for end in ends if isinstance(end, int)))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    declared = config.get("chat_template")
    if isinstance(declared, list):
        templates = {entry["name"]: entry["template"] for entry in declared}
    else:
        templates = {"default": declared} if isinstance(declared, str) else {}
    if path.exists():
        try:
            templates["default"] = path.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from None
    return templates
