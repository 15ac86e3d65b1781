from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from noria.errors import RequestError, WeightsError
from noria.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    " the  he\n\t",
    "emoji 😀 é e\u0301 日本語",
    "<|im_start|>a<|im_end|>",
    "<think>",
]


def edited(folder: Path, target: Path, **files: Any) -> Path:
    """A copy of a model folder with some JSON files replaced; a double underscore stands for the dot."""
    shutil.copytree(folder, target)
    for name, value in files.items():
        (target / name.replace("__", ".")).write_text(json.dumps(value))
    return target


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_ids_and_text_are_the_library_s(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{kind}_folder")
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == library.get_vocab_size()
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == library.encode(text, add_special_tokens=special).ids
            assert tokenizer.decode(ids) == library.decode(ids)


@given(text=st.text())
def test_byte_level_text_comes_back(byte_level_tokenizer: Tokenizer, text: str) -> None:
    assert byte_level_tokenizer.decode(byte_level_tokenizer.encode(text), skip_special_tokens=False) == text


def test_bytes_of_tokens(byte_level_folder: Path, metaspace_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder)
    library = Library.from_file(str(byte_level_folder / "tokenizer.json"))
    pieces = {text: tokenizer.token_bytes(library.token_to_id(text)) for text in library.get_vocab()}
    assert (pieces["\u0120the"], pieces["\u010a"], pieces["\u00c3"]) == (b" the", b"\n", b"\xc3")
    assert pieces["<|im_start|>"] == b"<|im_start|>"
    assert pieces["\u00e9\u00e9"] == "\u00e9\u00e9".encode()  # an added token is literal, whatever its letters
    tokenizer = load_tokenizer(metaspace_folder)
    library = Library.from_file(str(metaspace_folder / "tokenizer.json"))
    pieces = {text: tokenizer.token_bytes(library.token_to_id(text)) for text in library.get_vocab()}
    assert (pieces["\u2581the"], pieces["<0x0A>"], pieces["<0xFF>"], pieces["日"]) == (
        b" the",
        b"\n",
        b"\xff",
        "日".encode(),
    )


def test_the_space_before_a_text_is_not_part_of_it(metaspace_folder: Path) -> None:
    tokenizer = load_tokenizer(metaspace_folder)
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the the"
    assert tokenizer.decode(ids, continuation=True) == " the the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_special_tokens_in_a_text_are_parsed(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("a<|im_start|><think>")
    assert ids[1] == 1
    assert byte_level_tokenizer.special_ids == {0, 1, 2}  # an added token need not be a special one
    assert byte_level_tokenizer.decode(ids) == "a<think>"


def test_the_special_tokens_a_folder_declares(byte_level_folder: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(byte_level_folder)
    assert (plain.bos_token_id, plain.eos_token_ids) == (None, (2, 0))  # by name, where nothing else is declared
    assert plain.special_tokens == {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    folder = edited(
        byte_level_folder,
        tmp_path / "a",
        tokenizer_config__json=config,
        generation_config__json={"eos_token_id": [2, 7]},
        config__json={"text_config": {"eos_token_id": 9}},
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 7, 9))
    folder = edited(byte_level_folder, tmp_path / "b", tokenizer_config__json={}, special_tokens_map__json=config)
    assert load_tokenizer(folder).bos_token_id == 1


def test_what_is_put_around_a_text(byte_level_folder: Path, metaspace_folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(metaspace_folder).encode("") == [1]
    config = json.loads((metaspace_folder / "tokenizer_config.json").read_text())
    flags = {"add_bos_token": False, "add_eos_token": True}
    folder = edited(metaspace_folder, tmp_path / "a", tokenizer_config__json=config | flags)
    assert load_tokenizer(folder).encode("") == [2]
    config = {"bos_token": "<|im_start|>", "add_bos_token": True}
    folder = edited(byte_level_folder, tmp_path / "b", tokenizer_config__json=config)
    assert load_tokenizer(folder).encode("") == [1]
    assert load_tokenizer(folder).encode("", add_special_tokens=False) == []


def test_tokens_that_only_the_config_knows_are_added(byte_level_folder: Path, tmp_path: Path) -> None:
    size = load_tokenizer(byte_level_folder).vocab_size
    added = {
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<|x|>", "special": True},
        "1": {"content": "<|im_start|>", "special": True},
    }
    folder = edited(byte_level_folder, tmp_path / "a", tokenizer_config__json={"added_tokens_decoder": added})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool><|x|>") == [size + 1, size]
    assert tokenizer.decode([size + 1, size]) == "<tool>"
    assert tokenizer.vocab_size == size + 2


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_a_lone_surrogate_is_refused(byte_level_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D"):
        byte_level_tokenizer.encode(text)


@pytest.mark.parametrize("text", [None, b"bytes", 3, ["a"]])
def test_what_is_no_text_is_refused(byte_level_tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="must be a string, not"):
        byte_level_tokenizer.encode(text)


def test_a_folder_that_cannot_be_read_names_what_is_wrong(byte_level_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file or folder"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(WeightsError, match=r"no tokenizer\.json; name another"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"only tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(WeightsError, match="is no tokenizer"):
        load_tokenizer(tmp_path / "notes.txt")
    folder = edited(byte_level_folder, tmp_path / "a", generation_config__json=[1])
    with pytest.raises(WeightsError, match=r"generation_config\.json must hold a JSON object"):
        load_tokenizer(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"cannot read .*generation_config\.json"):
        load_tokenizer(folder)


def test_other_kinds_of_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WeightsError, match="unsupported kind WordPiece"):
        load_tokenizer(tmp_path)
    library.decoder = None
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WeightsError, match="unsupported kind none"):
        load_tokenizer(tmp_path)


def test_a_long_text_is_encoded_like_a_short_one_and_stops_no_other_thread(byte_level_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder)
    library = Library.from_file(str(byte_level_folder / "tokenizer.json"))
    text = "water flows, <|end|> 水 " * 20_000
    slowest, done = 0.0, threading.Event()

    def look() -> None:
        nonlocal slowest
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            slowest, last = max(slowest, now - last), now

    looker = threading.Thread(target=look)
    looker.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text, add_special_tokens=False)
    took = time.perf_counter() - begin
    done.set()
    looker.join()
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert slowest < 0.5 * took
