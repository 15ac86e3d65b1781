"""The prompts of a benchmark: their lengths, what they share, and files of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from noria.bench.prompts import (
    _WORDS,
    HIGH,
    LOW,
    as_ids,
    as_text,
    file_questions,
    prefix_questions,
    random_questions,
)
from noria.errors import NoriaError


def test_random_prompts() -> None:
    make = lambda seed: random_questions(20, random.Random(seed), as_ids, input_len=50, output_len=7)
    questions = make("a")
    assert {len(question.prompt) for question in questions} == {50}
    assert {question.output_len for question in questions} == {7}
    assert all(LOW <= token < HIGH for question in questions for token in question.prompt)
    assert len({tuple(question.prompt[:4]) for question in questions}) == 20
    assert make("a") == questions
    assert make("b") != questions


def test_lengths_in_a_range_and_a_shared_prefix() -> None:
    questions = random_questions(
        300, random.Random(1), as_ids, input_len=50, output_len=10, prefix_len=30, range_ratio=0.5
    )
    lengths, outputs = {len(q.prompt) - 30 for q in questions}, {q.output_len for q in questions}
    assert (min(lengths), max(lengths)) == (25, 75)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert len({tuple(q.prompt[:30]) for q in questions}) == 1
    assert len({tuple(q.prompt[30:40]) for q in questions}) == 300
    assert (
        min(
            q.output_len
            for q in random_questions(50, random.Random(1), as_ids, input_len=1, output_len=1, range_ratio=0.9)
        )
        == 1
    )


def test_prompts_of_words() -> None:
    [question] = random_questions(1, random.Random(1), as_text, input_len=40, output_len=1)
    assert isinstance(question.prompt, str)
    assert len(question.prompt.split(" ")) == 40
    assert len(_WORDS) > 250
    assert all(word.isascii() and word.isalpha() and word.islower() for word in _WORDS)


def test_a_few_prefixes() -> None:
    questions = prefix_questions(
        12, random.Random(1), as_ids, prefix_len=16, suffix_len=5, num_prefixes=3, output_len=4
    )
    counts: dict[tuple[int, ...], int] = {}
    for question in questions:
        assert len(question.prompt) == 21
        beginning = tuple(question.prompt[:16])
        counts[beginning] = counts.get(beginning, 0) + 1  # type: ignore[index]
    assert list(counts.values()) == [4, 4, 4]
    assert len({tuple(question.prompt[16:]) for question in questions}) == 12


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a wheel", "output_tokens": 3}, {"prompt": [1, 2, 3], "other": "ignored"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = file_questions(file, 9)
    assert (first.prompt, first.output_len) == ("a wheel", 3)
    assert (second.prompt, second.output_len) == ([1, 2, 3], 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 2: "),
        ('{"output_tokens": 3}', "missing required field `prompt`"),
        ('{"prompt": ""}', "line 2: prompt must be a text or a list of token ids that is not empty"),
        ('{"prompt": [1, true]}', "prompt must be a text"),
        ('{"prompt": "a", "output_tokens": 0}', "line 2: output_tokens must be at least 1, not 0"),
        ('{"prompt": "a", "output_tokens": "x"}', "line 2: "),
        (b'{"prompt": "\xff"}', "line 2: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(NoriaError) as caught:
        file_questions(file, 9)
    assert message in str(caught.value)


def test_a_file_that_has_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoriaError, match="cannot be read: No such file"):
        file_questions(tmp_path / "none", 1)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(NoriaError, match="no line with a prompt"):
        file_questions(tmp_path / "empty", 1)
