"""Whether values are of the types that dataclasses declare for them, and how to say in words that one is not."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal


def hints(cls: type) -> dict[str, Any]:
    """The annotated type of each field."""
    return typing.get_type_hints(cls)


def is_a(value: Any, kind: Any) -> bool:
    """Whether `value` is of the annotated type `kind`; an int counts as a float, a bool never as a number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(is_a(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is dict:
        return isinstance(value, dict) and all(
            is_a(item, kind) for pair in value.items() for item, kind in zip(pair, args)
        )
    if origin is tuple and args[-1] is not ...:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(is_a, value, args))
    if origin in (list, tuple):
        return isinstance(value, origin) and all(is_a(item, args[0]) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """The annotated type `kind` in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is dict:
        return f"a dictionary from {describe(args[0])} to {describe(args[1])}"
    if origin is tuple and args[-1] is not ...:
        return "a pair of " + " and ".join(map(describe, args))
    if origin in (list, tuple):
        return f"a {origin.__name__} of {describe(args[0])}"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "None"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )
