"""Tokenizers from the metadata of a GGUF file.

The keys are those of the GGUF specification (ggml's docs/gguf.md); what a missing key means is llama.cpp's choice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from noria.errors import WeightsError
from noria.text.bytelevel import ByteAlphabet
from noria.text.library import encoder
from noria.text.literals import LiteralTokens
from noria.text.pretokenizers import PreTokenizer, find_pre_tokenizer, pre_tokenizer_names
from noria.text.spm import SPACE, SentencePieceBPE
from noria.text.tokenizer import END_TOKENS, Vocabulary


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5  # padding of the vocabulary
    BYTE = 6  # <0x00> to <0xFF>


_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
_LITERAL = (*_SPECIAL, TokenType.USER_DEFINED)


def vocabulary_from_metadata(metadata: Mapping[str, Any], path: Path) -> Vocabulary:
    """The tokenizer in the metadata of a GGUF file, as `read_metadata` returns it; `path` is for error messages.

    Raises WeightsError when there is none, or one of an unsupported kind.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or "tokenizer.ggml.tokens" not in metadata:
        raise WeightsError(f"{path} has no tokenizer in its metadata; name another one with the option tokenizer")
    if model not in ("gpt2", "llama"):
        raise WeightsError(
            f"{path} has a tokenizer of the unsupported kind {model!r} (supported: gpt2, which is byte-level BPE, and "
            "llama, which is SentencePiece BPE); name another tokenizer with the option tokenizer"
        )
    table = _Table(metadata, path)
    return _byte_level(table) if model == "gpt2" else _sentence_piece(table)


@dataclass(frozen=True)
class _Table:
    """The vocabulary as the file lists it. Ids at the end that are only padding do not count."""

    metadata: Mapping[str, Any]
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @cached_property
    def types(self) -> list[int]:
        """For each id its TokenType; the file's length without the padding at the end."""
        count = len(self.get("tokens"))
        types = [int(kind) for kind in self.get("token_type", ())] or [int(TokenType.NORMAL)] * count
        if len(types) != count:
            raise self.damaged(f"{count} tokens but {len(types)} token types")
        while types and types[-1] == TokenType.UNUSED:
            types.pop()
        for token in (self.bos, *(self.id_of(name) for name in ("eos", "eot", "eom"))):
            # a file without types, or with wrong ones, must not print the ends of its turns
            if token is not None and token < len(types) and types[token] == TokenType.NORMAL:
                types[token] = int(TokenType.CONTROL)
        return types

    @cached_property
    def texts(self) -> list[str]:
        try:
            return [
                token if isinstance(token, str) else token.decode("utf-8")
                for token in self.get("tokens")[: len(self.types)]
            ]
        except UnicodeDecodeError:
            raise self.damaged("a token is not UTF-8") from None

    def damaged(self, what: str) -> WeightsError:
        return WeightsError(f"the tokenizer in {self.path} is damaged: {what}; fetch the file again")

    def id_of(self, name: str) -> int | None:
        token = self.get(f"{name}_token_id")
        return token if isinstance(token, int) and 0 <= token < len(self.get("tokens")) else None

    @property
    def bos(self) -> int | None:
        return self.id_of("bos")

    def ids(self, *kinds: TokenType) -> dict[str, int]:
        """Text -> id of the tokens of these kinds."""
        return {text: token for token, (text, kind) in enumerate(zip(self.texts, self.types)) if kind in kinds}

    def finish(
        self,
        encode_text: Callable[[str], list[int]],
        normal_bytes: Callable[[str], bytes],
        *,
        add_bos: bool,
        num_leading_spaces: int = 0,
    ) -> Vocabulary:
        """The parts that do not depend on the algorithm. normal_bytes: the bytes of a normal token's text."""
        special = self.ids(*_SPECIAL)
        ends = [self.id_of(name) for name in ("eos", "eot", "eom")] + [special.get(text) for text in END_TOKENS]
        prefix = self.bos if self.get("add_bos_token", add_bos) else None
        suffix = self.id_of("eos") if self.get("add_eos_token", False) else None
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
        named = {f"{name}_token": self.id_of(key) for name, key in names.items()}
        return Vocabulary(
            encode_text=encode_text,
            pieces=[self._bytes(text, kind, normal_bytes) for text, kind in zip(self.texts, self.types)],
            special_ids=frozenset(special.values()),
            bos_token_id=self.bos,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            prefix=() if prefix is None else (prefix,),
            suffix=() if suffix is None else (suffix,),
            num_leading_spaces=num_leading_spaces,
            chat_templates=self._chat_templates(),
            special_tokens={name: self.texts[token] for name, token in named.items() if token is not None},
        )

    def _bytes(self, text: str, kind: int, normal_bytes: Callable[[str], bytes]) -> bytes:
        if kind == TokenType.NORMAL:
            return normal_bytes(text)
        if kind == TokenType.BYTE:
            return bytes([self.byte_value(text)])
        return text.encode("utf-8") if kind in _LITERAL else b""

    def byte_value(self, text: str) -> int:
        """The byte of a token like <0x0A>."""
        try:
            return bytes.fromhex(text.removeprefix("<0x").removesuffix(">"))[0]
        except (ValueError, IndexError):
            raise self.damaged(f"the byte token {text!r} is not of the form <0x0A>") from None

    def _chat_templates(self) -> dict[str, str]:
        key = "tokenizer.chat_template"
        named = {name[len(key) + 1 :]: text for name, text in self.metadata.items() if name.startswith(f"{key}.")}
        return ({"default": self.metadata[key]} if key in self.metadata else {}) | named


def _byte_level(table: _Table) -> Vocabulary:
    name = table.get("pre", "default")
    pre_tokenizer = find_pre_tokenizer(name)
    if pre_tokenizer is None:
        raise WeightsError(
            f"{table.path} has the unknown pre-tokenizer {name!r}; known are {', '.join(pre_tokenizer_names())}; "
            "name another tokenizer with the option tokenizer"
        )
    library = _byte_level_library(table, pre_tokenizer)
    alphabet = ByteAlphabet()
    return table.finish(
        encoder(library),
        alphabet.to_bytes,
        add_bos=pre_tokenizer.add_bos,
    )


def _byte_level_library(table: _Table, pre_tokenizer: PreTokenizer) -> Library:
    texts = (merge if isinstance(merge, str) else merge.decode("utf-8") for merge in table.get("merges", ()))
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
    vocabulary = {text: token for token, text in enumerate(table.texts)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:  # the package raises plain Exception
        raise table.damaged(str(error)) from None
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.add_special_tokens([AddedToken(text, normalized=False) for text in table.ids(*_SPECIAL)])
    library.add_tokens([AddedToken(text, normalized=False) for text in table.ids(TokenType.USER_DEFINED)])
    return library


def _sentence_piece(table: _Table) -> Vocabulary:
    scores: Sequence[float] = [float(score) for score in table.get("scores", ())]
    if len(scores) < len(table.texts):
        raise table.damaged(f"{len(table.texts)} tokens but {len(scores)} scores")
    add_space_prefix = bool(table.get("add_space_prefix", True))
    byte_ids = {table.byte_value(text): token for text, token in table.ids(TokenType.BYTE).items()}
    merger = SentencePieceBPE(table.ids(TokenType.NORMAL), scores, byte_ids, table.id_of("unknown"))
    # like SentencePiece, look for them once the spaces are ▁; files have them with spaces (Gemma's runs of spaces)
    literals = LiteralTokens({text.replace(" ", SPACE): token for text, token in table.ids(*_LITERAL).items()})

    def encode_text(text: str) -> list[int]:
        ids: list[int] = []
        after_literal = True
        for part in literals.split(text.replace(" ", SPACE)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(merger.encode(SPACE + part if add_space_prefix and after_literal else part))
            after_literal = isinstance(part, int)
        return ids

    def normal_bytes(text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8")

    return table.finish(encode_text, normal_bytes, add_bos=True, num_leading_spaces=int(add_space_prefix))
