"""The items of /v1/responses' input: checked, and made into the shape in which they are kept and listed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, ValidationError, WithJsonSchema

from noria.errors import RequestError
from noria.server.ids import new_id
from noria.server.schema.base import Body, FieldError, describe_invalid
from noria.text.content import plain_text

Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
_TEXT = MappingProxyType({"input": ("input_text",), "assistant": ("output_text", "input_text")})
_PART_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA: Mapping[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "minItems": 1}]
}


def _is_content(value: Any) -> Any:
    """Which parts are possible depends on the item."""
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise RequestError("must be a string, or a list of parts that is not empty")


Content = Annotated[Any, PlainValidator(_is_content), WithJsonSchema(dict(_CONTENT_SCHEMA))]


def _texts(content: str | list[Any], kinds: tuple[str, ...], path: str) -> list[str]:
    """Annotations and log-probabilities, which output parts bring back, are no part of a prompt."""
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "output_text":
            part = {name: value for name, value in part.items() if name not in ("annotations", "logprobs")}
        try:
            texts.append(plain_text([part], kinds))
        except RequestError as error:
            raise FieldError(f"{path}[{index}]", str(error)) from None
    return texts


class MessageItem(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"phase": ()})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None

    def item(self) -> Item:
        is_output = self.role == "assistant"
        texts = _texts(self.content, _TEXT["assistant" if is_output else "input"], "content")
        kind: Item = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        content = [{**kind, "text": text} for text in texts]
        return {
            "id": self.id or new_id("msg", "_"),
            "type": "message",
            "role": self.role,
            "status": self.status or "completed",
            "content": content,
        }


class CallItem(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"caller": (), "namespace": (), "async": (False,)}
    )

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None

    def item(self) -> Item:
        return {
            "id": self.id or new_id("fc", "_"),
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status or "completed",
        }


class CallOutputItem(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"caller": (), "namespace": (), "name": ()})

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None

    def item(self) -> Item:
        return {
            "id": self.id or new_id("fco", "_"),
            "type": "function_call_output",
            "call_id": self.call_id,
            "output": "\n".join(_texts(self.output, _TEXT["input"], "output")),
            "status": self.status or "completed",
        }


class ReasoningItem(Body):
    """What the model thought before; the summary is for people and never in a prompt."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"encrypted_content": ()})

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    id: str | None = None
    status: Status | None = None

    def item(self) -> Item:
        texts = _texts(self.content or [], ("reasoning_text",), "content")
        return {
            "id": self.id or new_id("rs", "_"),
            "type": "reasoning",
            "summary": self.summary or [],
            "content": [{"type": "reasoning_text", "text": text} for text in texts],
            "status": self.status or "completed",
        }


_KINDS: Mapping[str, type[MessageItem | CallItem | CallOutputItem | ReasoningItem]] = MappingProxyType(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
        "reasoning": ReasoningItem,
    }
)


def _input(value: Any) -> list[Item]:
    """By hand: a union would list every way in which an item is none of its kinds."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value).item()]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string, or a list of items that is not empty")
    return [_item(each, f"input[{index}]") for index, each in enumerate(value)]


def _item(value: Any, path: str) -> Item:
    if not isinstance(value, dict):
        raise FieldError(path, "an item of the input must be an object")
    kind = value.get("type")
    model = _KINDS.get(kind) if isinstance(kind, str) else MessageItem if kind is None and "role" in value else None
    if model is None:
        raise FieldError(
            f"{path}.type", f"an item of the input must be of type {', '.join(_KINDS)}; {kind!r} is not supported"
        )
    try:
        return model.model_validate(value).item()
    except ValidationError as error:
        message, inner = describe_invalid(error, model)
        if inner is None:
            raise FieldError(path, message) from None
        told = f"{path}.{message}" if message.startswith(inner) else f"{path}.{inner}: {message}"
        raise FieldError(f"{path}.{inner}", told) from None
    except FieldError as error:
        raise FieldError(f"{path}.{error.path}", str(error)) from None


Input = Annotated[
    Any,
    PlainValidator(_input),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"anyOf": [model.model_json_schema() for model in _KINDS.values()]},
                    "minItems": 1,
                },
            ]
        }
    ),
]
