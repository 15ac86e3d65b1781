"""Tools in the body of a chat, the choice among them, and calls in earlier messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from noria.errors import RequestError
from noria.server.schema.base import Body

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAX_DEPTH = 100
# Keywords of JSON Schema by what their values are made of.
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


class FunctionBody(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments; none when left out")
    strict: bool | None = Field(None, description="the arguments always follow the schema")

    @model_validator(mode="after")
    def _check(self) -> FunctionBody:
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"the name of a function must be 1 to 64 letters, digits, _, - or ., not {self.name!r:.80}"
            )
        if self.parameters is not None:
            check_schema(self.parameters)
        return self


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """With parameters even where there are none: templates look into them."""
        description = {} if self.function.description is None else {"description": self.function.description}
        parameters = dict(_NO_PARAMETERS if self.function.parameters is None else self.function.parameters)
        return {"type": "function", "function": {"name": self.function.name, **description, "parameters": parameters}}


class CalledFunction(Body):
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON text")


class ToolCallBody(Body):
    """A call that the model made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="of a streamed call; changes nothing")

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Arguments that are no JSON object, because the model failed to write one, stay as they are."""
        arguments: Any = self.function.arguments
        if not arguments_as_text:
            try:
                found = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                found = None
            arguments = found if isinstance(found, dict) else arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _choice(value: Any) -> Any:
    """As it is, when it is a choice."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != {"type": "function", "function": {"name": name}} or not isinstance(name, str):
        raise RequestError(
            f"tool_choice {str(value)[:80]!r} is not supported; it must be none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    return value


ToolChoice = Annotated[
    Any,
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
                {"type": "null"},
            ]
        }
    ),
]


def check_schema(schema: dict[str, Any]) -> None:
    """The parameters of a function. Raises RequestError where they are no JSON schema, or not that of an object.

    What the keywords say is for whoever compiles it; here it must be something that a model can be shown.
    """
    if schema.get("type", "object") != "object":
        raise RequestError(f'parameters must have the type "object", not {str(schema["type"])[:40]!r}')
    level: list[tuple[str, Any]] = [("parameters", schema)]
    for _ in range(_MAX_DEPTH):
        for path, each in level:
            if complaint := _complaint(each):
                raise RequestError(f"{path} is no JSON schema: {complaint}")
        level = [part for path, each in level if isinstance(each, dict) for part in _parts(path, each)]
        if not level:
            return
    raise RequestError(f"parameters are nested deeper than {_MAX_DEPTH}")


def _complaint(schema: Any) -> str | None:
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"it must be an object, not {str(schema)[:40]!r}"
    kinds = schema.get("type", "object")
    for kind in kinds if isinstance(kinds, list) and kinds else [kinds]:
        if kind not in _TYPES:
            return f"there is no type {str(kind)[:40]!r}; types are {', '.join(_TYPES)}"
    for name in _OF_SCHEMAS:
        if not isinstance(schema.get(name, {}), dict):
            return f"{name} must be an object"
    for name in (*_LISTS, "enum"):
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            return f"{name} must be a list that is not empty"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        return "required must be a list of names"
    return None


def _parts(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema."""
    for name in _OF_SCHEMAS:
        for key, value in schema.get(name, {}).items():
            yield f"{path}.{name}.{key}", value
    for name in _LISTS:
        for index, value in enumerate(schema.get(name, ())):
            yield f"{path}.{name}[{index}]", value
    for name in _SINGLE:
        if name in schema:
            value = schema[name]
            if name == "items" and isinstance(value, list):  # before draft 2020-12
                yield from ((f"{path}.items[{index}]", each) for index, each in enumerate(value))
            else:
                yield f"{path}.{name}", value
