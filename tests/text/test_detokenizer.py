from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.text.bytelevel import byte_alphabet
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def byte_ids(byte_level_folder: Path) -> list[int]:
    """The token of each single byte."""
    tokenizer = load_tokenizer(byte_level_folder)
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([value])] for value in range(256)]


def test_the_alphabet_has_a_character_for_each_byte() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "\u0120", "\u010a")


def test_an_emoji_comes_whole_with_its_last_byte(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([byte_ids[value]]) for value in "😀a".encode()]
    assert deltas == ["", "", "", "😀", "a"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([byte_ids[value] for value in b"x\xf0\x9f"]) == "x"
    assert detokenizer.finish() == "\ufffd"


def test_bytes_that_are_no_utf8_are_replaced_as_soon_as_it_is_certain(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([byte_ids[value]]) for value in b"\xff\xe6\x97a"] == ["\ufffd", "", "", "\ufffda"]


def test_special_tokens_are_skipped_or_literal(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert Detokenizer(tokenizer).push(ids) == "a<think>b"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a<|im_end|><think>b"


def test_ids_outside_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push([tokenizer.vocab_size, 10**9, -1]) == ""
    assert tokenizer.token_bytes(-1) == b""


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(ids), *(position % (len(ids) + 1) for position in cuts)})
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_deltas_join_to_the_text_however_the_ids_are_cut(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    deltas = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False) == text


@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_deltas_join_to_the_decoded_ids_for_any_bytes(
    tokenizer: Tokenizer, byte_ids: list[int], data: bytes, cuts: list[int]
) -> None:
    ids = [byte_ids[value] for value in data]
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids) == data.decode("utf-8", errors="replace")
