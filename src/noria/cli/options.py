"""Command-line options out of the option dataclasses: a new field of EngineConfig is an option at once.

tyro parses; every message about a wrong command line is made to fit one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import tyro

from noria.cli.main import Done, UsageError
from noria.config import EngineConfig, SamplingParams

# Repeated (--stop a --stop b), so that they never swallow the argument that follows.
_REPEATED: Mapping[str, type] = MappingProxyType(
    {
        "stop": str,
        "stop_token_ids": int,
        "extra_token_buckets": int,
        "device_order": int,
        "logit_bias": str,
        "allowed_token_ids": int,
        "bad_words": str,
        "bad_token_ids": int,
        "api_key": str,
        "served_model_name": str,
    }
)
_NOT_OFFERED = (
    "model",  # the argument
    "skip_tokenizer_init",  # a command line speaks text
    "structured_outputs",  # see structured.py
)
# For options whose name says it all in Python.
_HELP: Mapping[str, str] = MappingProxyType(
    {
        "top_p": "keep the likeliest tokens that together have this probability",
        "min_p": "keep tokens at least this probable, relative to the likeliest one",
        "seed": "of the random numbers; the same seed gives the same text",
        "stop": "end where this string appears",
        "stop_token_ids": "end where this token appears",
        "ignore_eos": "go on after the end-of-sequence token",
        "include_stop_str_in_output": "keep the stop string or token in the text",
        "logit_bias": "ID=BIAS, -100 to 100: added to the logit of that token",
        "allowed_token_ids": "one more token that may be sampled; without any, all may",
        "bad_words": "one more text that is not generated, as the tokenizer writes it",
        "bad_token_ids": "one more token that is not sampled",
        "skip_special_tokens": "leave special tokens out of the text",
        "device": "where to run; auto: the best one that is here",
        "device_order": "id of one more device to use, in the order of the shards",
        "extra_token_buckets": "one more size to compile the step for",
        "enable_prefix_caching": "reuse the KV cache of equal beginnings",
        "attention_backend": "implementation of attention; auto: the fastest that works here",
        "compile_cache_dir": 'folder for compiled programs; "" compiles anew at every start',
        "compile_threads": "programs to compile at the same time",
    }
)

_METAVARS: Mapping[Any, str] = MappingProxyType(
    {str: "TEXT", int | None: "INT", float | None: "FLOAT", str | None: "TEXT"}
)

_AS_TEXT: Mapping[str, Any] = MappingProxyType({"speculative_config": str | None})  # what Python may give otherwise

Field = tuple[str, Any, Any]
MISSING = dataclasses.MISSING


def argument(name: str, metavar: str, text: str) -> Field:
    """The argument of a command, for `parse`."""
    return name, Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar=metavar, help=text)], MISSING


def optional_argument(name: str, metavar: str, text: str) -> Field:
    """An argument that may be left out: None then."""
    return name, Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar=metavar, help=text)], None


def option(name: str, kind: Any, default: Any, text: str, *aliases: str) -> Field:
    """One option of a command, for `parse`; required when `default` is MISSING."""
    metavar = _METAVARS.get(kind)
    annotation = Annotated[kind, tyro.conf.arg(help=text, aliases=aliases or None, metavar=metavar)]
    return name, annotation, default


def repeated(name: str, item: Any, text: str) -> Field:
    """An option that may be given several times; () when it is not."""
    return option(name, tyro.conf.UseAppendAction[tuple[item, ...]], (), text)


def model_argument() -> Field:
    return argument("model", "MODEL", "a folder, a .gguf file, a Hub id, or a name that noria pull knows")


def options_of(source: type) -> type:
    """All fields of a dataclass as options."""
    return _options_of(source, (), {})


def sampling_options(skip: Sequence[str] = (), **defaults: Any) -> type:
    """The fields of SamplingParams as options; defaults: where the command line's differ."""
    return _options_of(SamplingParams, (*_NOT_OFFERED, *skip), defaults)


def engine_options(offer: Sequence[str] = (), **defaults: Any) -> type:
    """The fields of EngineConfig as options. Its seed is the request's here: one seed is enough for one prompt.

    offer: fields that are otherwise left out.
    """
    return _options_of(EngineConfig, [name for name in (*_NOT_OFFERED, "seed") if name not in offer], defaults)


def parse(command: str, text: str, args: Sequence[str], fields: Sequence[Field], **groups: type) -> Any:
    """The values of a command's options: an object with the fields, and an object of its own for each group.

    text: what the command does, for --help. Raises UsageError, and Done after --help.
    """
    options = _dataclass(
        [*fields, *((name, Annotated[group, tyro.conf.arg(name="")], group()) for name, group in groups.items())]
    )
    options.__doc__ = text
    grouped = [(field.name, field.type) for group in groups.values() for field in dataclasses.fields(group)]
    alone = [(name, kind) for name, kind, _ in fields]
    _refuse_unknown(args, list(_flags([*alone, *grouped])), list(_arguments(alone)), command)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            values, unknown = tyro.cli(options, prog=f"noria {command}", args=list(args), return_unknown_args=True)
    except SystemExit as end:
        if not end.code:
            raise Done from None
        raise UsageError(f"{_in_one_line(complaint.getvalue())}; see noria {command} --help") from None
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; see noria {command} --help")
    return values


def values_of(group: Any) -> dict[str, Any]:
    """The options of a group by name, for the dataclass they came from."""
    return {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}


def group(fields: Sequence[Field]) -> type:
    """A group of options for `parse`."""
    return _dataclass(fields)


def sampling_params(group: Any, **others: Any) -> SamplingParams:
    """What sampling_options made of a command line. others: fields that are no options. Raises RequestError."""
    values = values_of(group)
    values["logit_bias"] = dict(map(_bias, values["logit_bias"]))
    values["allowed_token_ids"] = values["allowed_token_ids"] or None
    return SamplingParams(**values, **others)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias must be a token id and a number, as in 17=-2.5, not {text!r}") from None


def _options_of(source: type, skip: Sequence[str], defaults: Mapping[str, Any]) -> type:
    hints, comments = {**typing.get_type_hints(source), **_AS_TEXT}, dict(_comments(source))
    fields: list[Field] = []
    for field in dataclasses.fields(source):
        if field.name in skip:
            continue
        kind, default = hints[field.name], defaults.get(field.name, field.default)
        if (item := _REPEATED.get(field.name)) is not None:
            kind, default = tyro.conf.UseAppendAction[tuple[item, ...]], default or ()
        fields.append(option(field.name, kind, default, _HELP.get(field.name) or comments.get(field.name, "")))
    return _dataclass(fields)


def _comments(source: type) -> Iterator[tuple[str, str]]:
    """The comment behind each field of a dataclass: what a reader of the code sees is what --help says."""
    for match in re.finditer(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(source), re.MULTILINE):
        yield match[1], match[2]


def _flags(fields: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for name, annotation in fields:
        kind, *markers = typing.get_args(annotation)
        if tyro.conf.Positional not in markers:
            flag = name.replace("_", "-")
            yield f"--{flag}"
            if kind is bool:
                yield f"--no-{flag}"


def _arguments(fields: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for name, annotation in fields:
        if tyro.conf.Positional in typing.get_args(annotation):
            yield name


def _dataclass(fields: Iterable[Field]) -> Any:
    made = [(name, kind, dataclasses.field(default=default)) for name, kind, default in fields]
    return dataclasses.make_dataclass("Options", made, frozen=True)  # hashable, so that it may be a default


def _refuse_unknown(args: Sequence[str], known: Sequence[str], arguments: Sequence[str], command: str) -> None:
    """Before tyro looks: it would first complain about the option that is missing because its name is misspelt."""
    for argument in itertools.takewhile(lambda argument: argument != "--", args):
        name = argument.split("=")[0]
        flag = name.replace("_", "-")
        if re.match(r"--\w", argument) and flag not in (*known, "--help"):
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see noria {command} --help"
            if flag[2:] in arguments:
                hint = f"it is an argument, as in noria {command} {flag[2:].upper()}"
            raise UsageError(f"unknown option {name}; {hint}")


def _in_one_line(box: str) -> str:
    """The first paragraph of the parser's framed complaint, with Python's terms replaced by a user's."""
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()]
    rules = [number for number, line in enumerate(lines) if re.search("─{3}$|-{3}$", line)]  # "-" in ASCII terminals
    inside = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = " ".join(" ".join(inside).split()).rstrip(".")
    for pattern, plain in (
        (r"Missing from noria [\w ]+: (?:-\w TEXT, )?(\S+) .*", r"\1 is missing"),
        (r"Error parsing (\S+): (.*)", r"\1: \2"),
        (r"no type matching .* instantiated from \['(.*?)'\].*<class '(?:int|float)'>: (.*)", r"\2"),
        (r"[Ii]nvalid literal for int\(\) with base 10: (.*)", r"expected an integer, not \1"),
        (r"could not convert string to float: (.*)", r"expected a number, not \1"),
        (r"invalid choice (.*) for argument '(.*?)'\. Expected one of \((.*)\)", r"\2: expected one of \3, not \1"),
        (r"Missing value for argument '(\w+)'.*", lambda match: f"{match[1].upper()} must not begin with -"),
        (
            r"Missing value for argument '(?:-\w/)?(.*?)'.*",
            r"\1 needs a value (write \1=-x for one that begins with -)",
        ),
    ):
        text = re.sub(pattern, plain, text)
    return text
