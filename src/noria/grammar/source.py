"""From StructuredOutputsParams to a grammar that llguidance compiles. What can be said about it without compiling is
checked here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from noria.config import StructuredOutputsParams
from noria.errors import RequestError
from noria.grammar.structural_tag import structural_tag_grammar

MAX_SIZE = 1 << 18  # characters of a grammar, whatever its kind
MAX_DEPTH = 100  # of nested JSON
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)[ \t]*::=", re.MULTILINE)


def grammar_source(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """In a form that LLMatcher takes. special_tokens: text -> id, for structural tags that are such tokens.

    Raises RequestError, which names the kind and what is wrong with it.
    """
    kind = params.kind
    whitespace = not params.disable_any_whitespace
    match kind:
        case "json":
            return _from_schema(_json_object(kind, params.json), whitespace)
        case "json_object":
            return _from_schema({"type": "object"}, whitespace)
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(params.grammar or ""))
        case _:
            tag = _json_object(kind, params.structural_tag)
            return structural_tag_grammar(tag, special_tokens, lambda schema: with_options(schema, whitespace))


def check_size(params: StructuredOutputsParams) -> None:
    """Raises RequestError for what is too long to be looked at."""
    value = getattr(params, params.kind)
    size = sum(map(len, value)) if isinstance(value, tuple) else len(str(value))
    if size > MAX_SIZE:
        raise RequestError(f"structured_outputs: {params.kind} has {size} characters; at most {MAX_SIZE} are possible")


def with_options(schema: Mapping[str, Any], whitespace: bool) -> dict[str, Any]:
    """The schema as the compiler is to read it: what it does not know it must refuse, not ignore."""
    given = schema.get("x-guidance", {})
    if not isinstance(given, Mapping):
        raise RequestError("structured_outputs: x-guidance in a JSON schema must be an object")
    ours = {"lenient": False} if whitespace else {"lenient": False, "whitespace_flexible": False}
    return {**schema, "x-guidance": {**given, **ours}}


def _from_schema(schema: Mapping[str, Any], whitespace: bool) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema, whitespace), ensure_ascii=False))


def _json_object(kind: str, text: object) -> dict[str, Any]:
    """Raises RequestError for what is no JSON object, or is nested too deeply for the compiler."""
    what = "a JSON schema" if kind == "json" else "a description"
    try:
        value = json.loads(str(text), parse_constant=_no_number)
    except RecursionError:
        raise RequestError(f"structured_outputs: {kind} is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"structured_outputs: {kind} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"structured_outputs: {kind} must be {what}, which is a JSON object, not {str(text)[:40]}")
    if (depth := _depth(value)) > MAX_DEPTH:
        raise RequestError(f"structured_outputs: {kind} is nested {depth} deep; at most {MAX_DEPTH} are possible")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _depth(value: Any) -> int:
    """Of nested objects and arrays; level by level, because recursion has a limit of its own."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _lark(text: str) -> str:
    """Lark as it is; EBNF (GBNF) translated."""
    for name, count in Counter(_GBNF_RULE.findall(text)).items():
        if count > 1:  # the translation would keep the last one
            raise RequestError(f"structured_outputs: grammar: the rule {name} is defined {count} times")
    try:
        return any_to_lark(text)
    except RecursionError:
        raise RequestError("structured_outputs: grammar is nested too deeply") from None
    except Exception as error:
        raise RequestError(f"structured_outputs: grammar: {' '.join(str(error).split())}") from None
