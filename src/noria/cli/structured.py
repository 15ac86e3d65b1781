"""What the text of an answer must be, as options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from noria.cli import options
from noria.cli.main import UsageError
from noria.config import StructuredOutputsParams
from noria.grammar.compiler import GrammarCompiler
from noria.text.tokenizer import Tokenizer


def structured_options() -> type:
    """For `parse`."""
    return options.group(
        [
            options.option("json_schema", str | None, None, "the answer is JSON of this schema: a file, or its text"),
            options.option("json_object", bool, False, "the answer is a JSON object"),
            options.option("regex", str | None, None, "the answer matches this regular expression"),
            options.repeated("choice", str, "the answer is this text, or one more that is given so"),
            options.option(
                "grammar", str | None, None, "the answer follows this Lark or EBNF grammar: a file, or its text"
            ),
        ]
    )


def structured_outputs(values: Any) -> StructuredOutputsParams | None:
    """What structured_options made of a command line; None when nothing is asked for.

    Raises UsageError when it is more than one thing or a file cannot be read, RequestError when it cannot be followed.
    """
    given = {name: value for name, value in options.values_of(values).items() if value not in (None, False, ())}
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in list(given)[:2])
        raise UsageError(f"{first} and {second} do not work together; give one of them")
    for name in given.keys() & {"json_schema", "grammar"}:
        given[name] = _read(name, given[name])
    if "json_schema" in given:
        given = {"json": given["json_schema"]}
    return StructuredOutputsParams(**given) if given else None


def refuse_bad(params: StructuredOutputsParams, tokenizer: Tokenizer) -> None:
    """Before a model is loaded for it. Raises RequestError."""
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    try:
        compiler.validate(params)
    finally:
        compiler.close()


def _read(name: str, given: str) -> str:
    """given: a path, or the text itself, which begins or contains what no usual path does."""
    if given.lstrip().startswith(("{", "start:")) or "::=" in given or "\n" in given:
        return given
    return _read_file(name, given)


def _read_file(name: str, path: str) -> str:
    flag = f"--{name.replace('_', '-')}"
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path} is not UTF-8 text at byte {error.start}") from None
