"""What a body asks of the text: OpenAI's response_format, vLLM's structured_outputs and its older names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field

from noria.config import StructuredOutputsParams
from noria.errors import RequestError
from noria.server.schema.base import Body

_OLDER: Mapping[str, str] = MappingProxyType(
    {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
)


class StructuredBody(Body):
    """At most one of these may ask for something."""

    response_format: dict[str, Any] | None = Field(
        None, description="of type text, json_object, json_schema or structural_tag"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, regex, choice, grammar, json_object, structural_tag"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="older name of structured_outputs.grammar")

    def structure(self) -> StructuredOutputsParams | None:
        """Raises RequestError that begins with the name of the field that is wrong."""
        found: dict[str, StructuredOutputsParams] = {}
        for name in StructuredBody.model_fields:
            value = getattr(self, name)
            if value is None:
                continue
            if (params := _read(name, value)) is not None:
                found[name] = params
        if len(found) > 1:
            first, second = list(found)[:2]
            raise RequestError(f"{second} does not work together with {first}; give one of them")
        return next(iter(found.values()), None)


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    """None where the value asks for nothing."""
    if name == "response_format":
        return _response_format(value)
    if name != "structured_outputs":
        return _named(name, lambda: StructuredOutputsParams(**{_OLDER[name]: value}))
    given = {key: each for key, each in value.items() if each is not None}
    return StructuredOutputsParams(**given) if given else None


def _response_format(value: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind == "structural_tag":
        return _named("response_format", lambda: StructuredOutputsParams(structural_tag=dict(value)))
    allowed = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if kind not in allowed:
        kinds = ", ".join((*allowed, "structural_tag"))
        raise RequestError(f"response_format: type must be one of {kinds}, not {kind!r}")
    if unknown := set(value) - allowed[kind]:
        raise RequestError(f"response_format of type {kind} has no {min(unknown)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return _json_schema(value.get("json_schema"))


def _json_schema(value: Any) -> StructuredOutputsParams:
    """The answer follows the schema whether or not it is `strict`."""
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise RequestError("response_format: json_schema must have a schema, which is an object")
    types = {"name": str, "description": str, "strict": bool, "schema": dict}
    for name, each in value.items():
        if name not in types:
            raise RequestError(f"response_format: json_schema has no {name}; it has {', '.join(types)}")
        if each is not None and not isinstance(each, types[name]):
            kind = {str: "a string", bool: "true or false"}.get(types[name])
            raise RequestError(f"response_format: json_schema.{name} must be {kind}")
    return _named("response_format", lambda: StructuredOutputsParams(json=value["schema"]))


def _named(name: str, make: Callable[[], StructuredOutputsParams]) -> StructuredOutputsParams:
    try:
        return make()
    except RequestError as error:
        raise RequestError(f"{name}: {str(error).removeprefix('structured_outputs: ')}") from None
