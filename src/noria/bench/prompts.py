"""The prompts of a run: random ones, ones with shared beginnings, and those of a file.

Made-up prompts are random token ids. Where a server takes text alone, each id becomes one of some common words, which
are one token each in the vocabularies of common models; how many tokens a server counts is in the result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from noria.bench.records import Prompt, Question
from noria.errors import NoriaError

# Ids from LOW to HIGH are plain pieces of text in the vocabularies of common models.
LOW, HIGH = 1000, 30000
_COMMON = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through back
much before go good new write our used me man too any day same right look think also around another came come work
three word must because does part even place well such here take why things help put years different away again
off went old number great tell men say small every found still between name should home big give air line set own
under read last never us left end along while might next sound below saw something thought both few those always
looked show large often together asked house world going want school important until form food keep children feet
land side without boy once animals life enough took sometimes four head above kind began almost live page got
earth need far hand high year mother light parts country father let night following picture being study second
eyes soon times story boys since white days ever paper hard near sentence better best across during today others
however sure means knew try told young miles sun ways thing whole hear example heard several change answer room
sea against top turned learn point city play toward five using himself usually
"""
_WORDS = tuple(_COMMON.split())


def as_text(token_ids: Sequence[int]) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in token_ids)


def as_ids(token_ids: Sequence[int]) -> list[int]:
    return list(token_ids)


def random_ids(count: int, source: random.Random) -> list[int]:
    return [source.randrange(LOW, HIGH) for _ in range(count)]


def random_questions(
    count: int,
    source: random.Random,
    write: Callable[[Sequence[int]], Prompt],
    *,
    input_len: int,
    output_len: int,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
) -> list[Question]:
    """prefix_len: tokens that all share, before their own. range_ratio: lengths are drawn from (1 - ratio) to
    (1 + ratio) times what they are otherwise."""
    prefix = random_ids(prefix_len, source)

    def length(middle: int) -> int:
        low, high = math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))
        return max(1, source.randint(low, high))

    lengths = [(length(input_len), length(output_len)) for _ in range(count)]
    return [Question(write(prefix + random_ids(own, source)), out) for own, out in lengths]


def prefix_questions(
    count: int,
    source: random.Random,
    write: Callable[[Sequence[int]], Prompt],
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
) -> list[Question]:
    """Each prompt is one of a few prefixes, equally often and in random order, and a suffix of its own."""
    prefixes = [random_ids(prefix_len, source) for _ in range(num_prefixes)]
    order = [index % num_prefixes for index in range(count)]
    source.shuffle(order)
    return [Question(write(prefixes[index] + random_ids(suffix_len, source)), output_len) for index in order]


class _Row(msgspec.Struct):
    prompt: Any
    output_tokens: int | None = None


def file_questions(path: Path, output_len: int) -> list[Question]:
    """Lines of JSON: {"prompt": a text or token ids, "output_tokens": how many to generate, or output_len}.

    Raises NoriaError, which names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise NoriaError(f"--dataset-path {path} cannot be read: {error.strerror or error}") from None
    decode = msgspec.json.Decoder(_Row).decode
    questions = list[Question]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NoriaError(f"{path} line {number}: {error}") from None
        if not _is_prompt(row.prompt):
            raise NoriaError(f"{path} line {number}: prompt must be a text or a list of token ids that is not empty")
        length = output_len if row.output_tokens is None else row.output_tokens
        if length < 1:
            raise NoriaError(f"{path} line {number}: output_tokens must be at least 1, not {length}")
        questions.append(Question(row.prompt, length))
    if not questions:
        raise NoriaError(f"{path} has no line with a prompt")
    return questions


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)
