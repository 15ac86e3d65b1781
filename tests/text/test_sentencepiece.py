"""The merging of SentencePiece BPE against its definition, word by word."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from noria.text.literals import LiteralTokens
from noria.text.spm import SPACE, SentencePieceBPE

ALPHABET = f"abc{SPACE}"


def expected(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: merge the pair with the best union, the leftmost of equals, until there is none."""
    symbols = list(text)
    while True:
        unions = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not unions:
            return symbols
        at = min(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(
    text=st.text(alphabet=ALPHABET, max_size=60),
    merged=st.dictionaries(
        st.text(alphabet=ALPHABET, min_size=2, max_size=5), st.integers(-3, 0).map(float), max_size=12
    ),
)
def test_merging_is_the_definition(text: str, merged: dict[str, float]) -> None:
    scores = merged | dict.fromkeys(ALPHABET, -9.0)
    pieces = {piece: token for token, piece in enumerate(scores)}
    bpe = SentencePieceBPE(pieces, list(scores.values()), {}, None)
    assert bpe.encode(text) == [pieces[symbol] for symbol in expected(text, scores)]


def test_equal_scores_merge_from_the_left() -> None:
    bpe = SentencePieceBPE({"a": 0, "aa": 1, "aaa": 2}, [-1.0, -1.0, -2.0], {}, None)
    assert bpe.encode("aaa") == [2]
    assert bpe.encode("aaaaa") == [1, 2]  # aa aa a, then the leftmost aaa there is


def test_a_character_that_is_no_piece_becomes_bytes_or_the_unknown_token() -> None:
    byte_ids = {value: 10 + value for value in range(256)}
    assert SentencePieceBPE({"a": 0}, [0.0], byte_ids, 1).encode("aé") == [0, 10 + 0xC3, 10 + 0xA9]
    assert SentencePieceBPE({"a": 0}, [0.0], {}, 1).encode("éa") == [1, 0]
    assert SentencePieceBPE({"a": 0}, [0.0], {}, None).encode("éa") == [0]


def test_a_long_run_without_spaces_takes_no_quadratic_time() -> None:
    bpe = SentencePieceBPE({"a": 0, "b": 1, "ab": 2, "abab": 3}, [-9.0, -9.0, -1.0, -2.0], {}, None)
    assert bpe.encode("ab" * 20_000) == [3] * 10_000


def test_the_leftmost_and_then_the_longest_literal_wins() -> None:
    literals = LiteralTokens({"<b>": 1, "<bold>": 2, "b><": 3, "\n": 4, "\n\n": 5, "": 6})
    assert list(literals.split("x<b><bold>\n\n\ny<bo")) == ["x", 1, 2, 5, 4, "y<bo"]
    assert list(literals.split("")) == []
    assert list(LiteralTokens({}).split("a")) == ["a"]


@given(text=st.text(alphabet="ab<", max_size=20), tokens=st.sets(st.text(alphabet="ab<", min_size=1, max_size=4)))
def test_splitting_loses_nothing(text: str, tokens: set[str]) -> None:
    texts = sorted(tokens)
    parts = list(LiteralTokens({token: index for index, token in enumerate(texts)}).split(text))
    assert "".join(texts[part] if isinstance(part, int) else part for part in parts) == text
    assert not any(token in part for part in parts if isinstance(part, str) for token in texts)
