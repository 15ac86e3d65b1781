from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from noria.errors import WeightsError
from noria.text.pretokenizers import find_pre_tokenizer, pre_tokenizer_names
from noria.text.tokenizer import Tokenizer, load_tokenizer
from noria.text.tokenizer_gguf import vocabulary_from_metadata

Write = Callable[..., Path]
TEXTS = [
    "",
    "The quick brown fox",
    "they'LL say 12345 ½ x\n\n  \t y  ",
    "emoji 😀 é 日本語",
    "<|im_start|>a<think>éé<|im_end|>",
]


def from_metadata(values: dict[str, Any]) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return Tokenizer(vocabulary_from_metadata(metadata, Path("model.gguf")))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_the_original_s(
    byte_level: Library, byte_level_metadata: dict[str, Any], write_gguf: Write, text: str
) -> None:
    tokenizer = load_tokenizer(write_gguf(byte_level_metadata))
    ids = byte_level.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_file_and_a_folder_give_the_same_tokenizer(
    byte_level_folder: Path, byte_level_metadata: dict[str, Any], write_gguf: Write
) -> None:
    file, folder = load_tokenizer(write_gguf(byte_level_metadata)), load_tokenizer(byte_level_folder)
    assert file.vocab_size == folder.vocab_size
    assert file.special_ids == folder.special_ids
    assert file.eos_token_ids == folder.eos_token_ids
    assert [file.token_bytes(i) for i in range(-1, 500)] == [folder.token_bytes(i) for i in range(-1, 500)]


@pytest.fixture(scope="session")
def variants(byte_level_metadata: dict[str, Any]) -> list[Tokenizer]:
    names = ("default", "llama-bpe", "tekken", "deepseek-llm", "deepseek-v3")
    return [from_metadata(byte_level_metadata | {"pre": name}) for name in names]


@given(text=st.text())
def test_byte_level_text_comes_back_with_any_pre_tokenizer(variants: list[Tokenizer], text: str) -> None:
    for tokenizer in variants:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def words(pre: str, text: str) -> list[str]:
    """The pieces into which a pre-tokenizer cuts a text."""
    pre_tokenizer = find_pre_tokenizer(pre)
    assert pre_tokenizer is not None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "we'll see 2024!!\n\n  x", ["we", "'ll", " see", " 2024", "!!", "\n\n ", " x"]),
        ("smollm", "see 20  1", ["see", " ", "2", "0", "  ", "1"]),
        ("llama-bpe", "We'LL see 12345!!\n\n  x", ["We", "'LL", " see", " ", "123", "45", "!!\n\n", " ", " x"]),
        ("qwen2", "We'LL see 123 ()\n", ["We", "'LL", " see", " ", "1", "2", "3", " ()\n"]),
        ("tekken", "camelCase ABCdef 12a/b/\n", ["camel", "Case", " ABCdef", " ", "1", "2", "a", "/b", "/\n"]),
        ("gpt-4o", "It's camelCase 1234", ["It's", " camel", "Case", " ", "123", "4"]),
        ("deepseek-llm", "a b12\n日本x, y ", ["a", " b", "12", "\n", "日本", "x", ",", " y", " "]),
        ("deepseek-coder", "a b12\n日本!", ["a", " b", "1", "2", "\n", "日本", "!"]),
        ("deepseek-v3", "ab1234日本#tag (x)\n", ["ab", "123", "4", "日本", "#tag", " (", "x", ")\n"]),
        ("default", "a+b 1234 x!", ["a", "+", "b", " ", "123", "4", " x", "!"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_words(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", pre_tokenizer_names())
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    text = "It's Größe 1234½ 日本語 한국 😀!! x_y\r\n\n \t<z> \u0300\u00a0" * 2
    assert "".join(words(pre, text)) == text


def test_merges_are_not_needed_for_whole_words_where_the_model_says_so(byte_level_metadata: dict[str, Any]) -> None:
    tokens = [*byte_level_metadata["tokens"], "xqz"]
    metadata = byte_level_metadata | {"tokens": tokens, "token_type": [*byte_level_metadata["token_type"], 1]}
    assert from_metadata(metadata | {"pre": "llama-bpe"}).encode("xqz") == [len(tokens) - 1]
    assert len(from_metadata(metadata | {"pre": "gpt-2"}).encode("xqz")) == 3


def test_padding_at_the_end_of_the_vocabulary_is_no_token(byte_level_metadata: dict[str, Any]) -> None:
    tokens = [*byte_level_metadata["tokens"], "[PAD1]", "[PAD2]"]
    metadata = byte_level_metadata | {"tokens": tokens, "token_type": [*byte_level_metadata["token_type"], 5, 5]}
    tokenizer = from_metadata(metadata)
    assert tokenizer.vocab_size == len(tokens) - 2
    assert tokenizer.token_bytes(len(tokens) - 1) == b""
    assert tokenizer.decode(tokenizer.encode("[PAD1]")) == "[PAD1]"
    assert max(tokenizer.encode("[PAD1]")) < len(tokens) - 2


@pytest.mark.parametrize(
    ("values", "prefix", "suffix"),
    [
        ({"pre": "gpt-2", "bos_token_id": 1}, [], []),
        ({"pre": "llama-bpe", "bos_token_id": 1}, [1], []),
        ({"pre": "llama-bpe", "bos_token_id": 1, "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe"}, [], []),  # nothing to add
        ({"pre": "gpt-2", "bos_token_id": 1, "add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_what_is_put_around_a_text(
    byte_level_metadata: dict[str, Any], values: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = from_metadata(byte_level_metadata | values)
    assert tokenizer.encode("") == prefix + suffix
    assert tokenizer.encode("", add_special_tokens=False) == []
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == prefix + plain + suffix


def test_ends_are_the_declared_ones_and_control_tokens_of_known_names(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = from_metadata(byte_level_metadata | {"eos_token_id": 0, "eot_token_id": 7, "eom_token_id": 8})
    assert tokenizer.eos_token_ids == (0, 7, 8, 2)
    assert {0, 7, 8, 2} <= tokenizer.special_ids  # never printed, though their types say they are text
    assert from_metadata(byte_level_metadata | {"eos_token_id": 10**6}).eos_token_ids == (2, 0)


def test_sentence_piece(sentence_piece_metadata: dict[str, Any], write_gguf: Write) -> None:
    tokenizer = load_tokenizer(write_gguf(sentence_piece_metadata))
    tokens = sentence_piece_metadata["tokens"]

    def pieces(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text, add_special_tokens=False)]

    assert tokenizer.encode("")[:1] == [1]
    assert pieces("in the end") == ["in", "▁the", "▁", "e", "n", "d"]
    assert pieces("cabc") == ["c", "abc"]
    assert pieces("é\x00") == ["<0xC3>", "<0xA9>", "<0x00>"]
    assert pieces("a   b\n\n\n\n") == ["a", "  ", "▁", "b", "\n\n\n", "<0x0A>"]  # user-defined, the longest first
    assert pieces("a<bold></s>") == ["a", "<bold>", "</s>"]
    assert pieces("<0x41>")[0] == "<0x3C>"  # the name of a byte token is text
    assert tokenizer.eos_token_ids == (2, 3)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    values = [tokenizer.token_bytes(tokens.index(text)) for text in ("▁the", "<0xF0>", "    ", "</s>")]
    assert values == [b" the", b"\xf0", b"    ", b"</s>"]


@pytest.mark.parametrize("text", ["", "the in", " the", "  \n\n\n\n a", "é日本😀<b>", "</s>x<end_of_turn>"])
def test_sentence_piece_text_comes_back(sentence_piece_metadata: dict[str, Any], text: str) -> None:
    tokenizer = from_metadata(sentence_piece_metadata)
    assert tokenizer.decode(tokenizer.encode(text)[1:], skip_special_tokens=False) == text


@given(text=st.text(alphabet="the \n<b>é😀", max_size=20))
def test_any_sentence_piece_text_comes_back(sentence_piece_metadata: dict[str, Any], text: str) -> None:
    tokenizer = from_metadata(sentence_piece_metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_space_is_put_before_each_text_where_the_model_wants_it(sentence_piece_metadata: dict[str, Any]) -> None:
    values = {key: value for key, value in sentence_piece_metadata.items() if key != "add_space_prefix"}
    tokenizer = from_metadata(values)
    pieces = [values["tokens"][token] for token in tokenizer.encode("the</s>the")]
    assert pieces == ["<s>", "▁the", "</s>", "▁the"]
    for text in ("the", " the", "é", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("the"), continuation=True) == " the"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "has no tokenizer in its metadata"),
        ({"tokens": None}, "has no tokenizer in its metadata"),
        ({"model": "t5"}, "unsupported kind 't5'"),
        ({"pre": "from-the-future"}, "unknown pre-tokenizer 'from-the-future'; known are .*qwen2"),
        ({"token_type": [1, 1]}, "damaged: .* tokens but 2 token types"),
        ({"merges": ["no such", "tokens here"]}, "damaged: .*out of vocabulary"),
        ({"tokens": [b"\xff"], "token_type": [1], "merges": []}, "damaged: a token is not UTF-8"),
    ],
)
def test_a_bad_vocabulary_is_refused_in_one_line(
    byte_level_metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    values = {key: value for key, value in (byte_level_metadata | change).items() if value is not None}
    with pytest.raises(WeightsError, match=message) as error:
        from_metadata(values)
    assert not re.search(r"\n", str(error.value))


def test_a_bad_sentence_piece_vocabulary_is_refused(sentence_piece_metadata: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match="tokens but 0 scores"):
        from_metadata(sentence_piece_metadata | {"scores": []})
    tokens = ["<0xZZ>" if token == "<0x00>" else token for token in sentence_piece_metadata["tokens"]]
    with pytest.raises(WeightsError, match="'<0xZZ>' is not of the form <0x0A>"):
        from_metadata(sentence_piece_metadata | {"tokens": tokens})
