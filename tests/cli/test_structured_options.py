"""noria run with a schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome

Noria = Callable[..., Outcome]


def answer(noria: Noria, small: list[str], model: str, *args: str) -> str:
    outcome = noria("run", model, "-p", "The mill", *args, "--max-tokens", "40", *small)
    assert outcome.status == 0, outcome.err
    return outcome.out.removesuffix("\n")


def test_the_answer_is_what_was_asked_for(noria: Noria, small: list[str], plain_model: str, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["a mill", 7]}')
    grammar.write_text('start: "<" /[a-c]{2}/ ">"')
    assert json.loads(answer(noria, small, plain_model, "--json-schema", str(schema))) in ("a mill", 7)
    assert json.loads(answer(noria, small, plain_model, "--json-schema", schema.read_text())) in ("a mill", 7)
    assert answer(noria, small, plain_model, "--grammar", 'root ::= "x" | "yy"') in ("x", "yy")
    assert answer(noria, small, plain_model, "--choice", "red", "--choice=-green") in ("red", "-green")
    text = answer(noria, small, plain_model, "--grammar", str(grammar))
    assert (text[0], text[-1], len(text)) == ("<", ">", 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--regex", "("), "structured_outputs: regex cannot be used: "),
        (("--regex", "a", "--json-object"), "--json-object and --regex do not work together; give one of them"),
        (("--json-schema", "nowhere.json"), "--json-schema nowhere.json: No such file or directory"),
        (("--json-schema", '{"type": '), "structured_outputs: json is not JSON: "),
        (("--grammar", "FOLDER/bytes"), "is not UTF-8 text at byte 1"),
        (("--json-schema", "FOLDER/list"), "json must be a JSON schema"),
        (("--choice", ""), "choice must hold at least one text, and no empty one"),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(
    noria: Noria, plain_model: str, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "list").write_text("[1]")
    given = [each.replace("FOLDER", str(tmp_path)) for each in args]
    outcome = noria("run", plain_model, "-p", "The mill", *given)
    assert message in outcome.error()
    assert "compiling" not in outcome.err
