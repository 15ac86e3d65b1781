"""Every kind of tokenizer under a grammar: what may come next is right to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.config import StructuredOutputsParams
from noria.grammar.compiler import GrammarCompiler
from noria.grammar.vocabulary import GrammarVocabulary
from noria.text.tokenizer import Tokenizer, load_tokenizer

KINDS = ("byte-level folder", "metaspace folder", "byte-level GGUF", "SentencePiece GGUF", "with a space before")


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest,
    byte_level_folder: Path,
    metaspace_folder: Path,
    byte_level_metadata: dict[str, Any],
    sentence_piece_metadata: dict[str, Any],
    write_gguf: Callable[..., Path],
) -> Tokenizer:
    makers = (
        lambda: byte_level_folder,
        lambda: metaspace_folder,
        lambda: write_gguf(byte_level_metadata),
        lambda: write_gguf(sentence_piece_metadata),
        lambda: write_gguf(sentence_piece_metadata | {"add_space_prefix": True}),
    )
    return load_tokenizer(makers[KINDS.index(request.param)]())


def allowed(tokenizer: Tokenizer, regex: str, token_ids: list[int]) -> set[int]:
    """Token ids that may follow."""
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    matcher = compiler.compile(StructuredOutputsParams(regex=regex)).result().copy()
    compiler.close()
    for token_id in token_ids:
        matcher.accept(token_id)
    row = np.zeros(-(-tokenizer.vocab_size // 32) + 2, np.int32)
    matcher.fill(row)
    assert matcher.error is None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_tokens_are_allowed_by_their_bytes(tokenizer: Tokenizer) -> None:
    """Of a text without choice but where tokens may end: every token that is a beginning of the rest."""
    free = allowed(tokenizer, r"(.|\n)*", [])
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.eos_token_ids:
            assert token_id in free
        elif token_id in tokenizer.special_ids or not piece:
            assert token_id not in free
        elif piece.isascii():
            assert token_id in free, piece


def test_what_follows_is_right_to_the_byte(tokenizer: Tokenizer) -> None:
    texts = ["the quick", "a", "é日", " in the"]
    alternatives = "|".join(texts)
    found = allowed(tokenizer, alternatives, [])
    starts = [text.encode() for text in texts]
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        fits = bool(piece) and any(start.startswith(piece) for start in starts)
        assert (token_id in found) == (fits and token_id not in tokenizer.special_ids), piece


@pytest.mark.parametrize("text", ["the quick brown", "é日本", "a  b", " <s>", "<|im_end|> </s>", "\n\n\n", "😀"])
def test_forced_text_is_spelled_in_full(tokenizer: Tokenizer, text: str) -> None:
    """Whatever the tokenizer does with a text at its beginning or with special tokens in it."""
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.eos_token_ids[0])
    for given in (text, text.encode(), text.encode()[:-1]):
        spelled = given.encode() if isinstance(given, str) else given
        ids = vocabulary(given)
        if ids or all(bytes([byte]) in vocabulary.tokens for byte in spelled):
            assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == spelled
        assert tokenizer.special_ids.isdisjoint(ids)


def test_a_long_forced_text_can_be_written(tokenizer: Tokenizer) -> None:
    """Token by token, always the first that is allowed."""
    text, written = "the the in a abc the " * 3, b""
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    matcher = compiler.compile(StructuredOutputsParams(choice=[text])).result().copy()
    compiler.close()
    row = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    while not matcher.has_ended:
        matcher.fill(row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        ends = set(tokenizer.eos_token_ids)
        assert not ends & set(ids) or ends == set(ids)
        matcher.accept(ids[0])
        assert matcher.error is None
        written += b"" if ids[0] in ends else tokenizer.token_bytes(ids[0])
    assert written.decode() == text
