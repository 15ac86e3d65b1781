"""The base of all bodies: strict types, no unknown fields, and complaints that name the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from noria.errors import RequestError

_MAX_NAME = 80  # characters of a name that are repeated


class FieldError(RequestError):
    """A complaint about a part of a body that is checked by hand."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path  # like messages[0].content


class UnsupportedError(RequestError):
    """A parameter of the API that is not here, with a value that asks for something."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not supported; leave it out")
        self.name = name


class Body(BaseModel):
    """Null stands for a field that was left out, wherever the field has a default.

    NEUTRAL: parameters of the API that are not supported, with the values that ask for nothing: those are accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        # 16.0 is an integer to JSON Schema, and to clients whose language has one kind of numbers.
        kept = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in content.items()}
        for name in content.keys() & cls.NEUTRAL.keys():
            if not any(_same(content[name], value) for value in (None, *cls.NEUTRAL[name])):
                raise UnsupportedError(name)
            del kept[name]
        return kept


def _same(given: Any, neutral: Any) -> bool:
    """Equal and of one kind: 0 is not False."""
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)


def describe_invalid(error: ValidationError, model: type[BaseModel]) -> tuple[str, str | None]:
    """The first complaint for people, and the field it is about as a path like messages[0].content."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = _path(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(first["loc"][-1]), model.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near and len(first["loc"]) == 1 else ""
            return f"{_short(path) or 'a field without a name'} is not supported{hint}", path
        case "missing":
            return f"{path} is missing", path
        case "value_error":
            cause = first.get("ctx", {}).get("error", first["msg"])
            message = str(cause)
            if isinstance(cause, FieldError):
                return message, cause.path
            if isinstance(cause, UnsupportedError) and path:
                path = f"{path}.{cause.name}"
                return str(UnsupportedError(path)), path
            return message, path or _field_named(message, model)
    message = first["msg"]
    return f"{path}: {message[:1].lower()}{message[1:]}", path


def _short(name: str | None) -> str | None:
    """Whatever a client may call a field."""
    return name if name is None or len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def _path(location: tuple[int | str, ...]) -> str | None:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


def _field_named(message: str, model: type[BaseModel]) -> str | None:
    """The field that a message of one line begins with, as those of SamplingParams do."""
    word = message.split(maxsplit=1)[0].rstrip(":")
    known = word in model.model_fields or word in getattr(model, "NEUTRAL", ())
    return word if known else None
