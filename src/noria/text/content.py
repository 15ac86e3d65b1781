"""The content of a message as OpenAI's API has it: a string, or a list of parts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from noria.errors import RequestError


def plain_text(content: Any, kinds: Collection[str] = ("text",)) -> str:
    """A text as it is, or the texts of its parts, a line each.

    kinds: the types of part that hold a text. Raises RequestError for any other, by name: this model reads text only.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError("the content of a message must be a string, or a list of parts that is not empty")
    return "\n".join(_text_of(part, kinds) for part in content)


def _text_of(part: Any, kinds: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(
            f"a content part must be of type {' or '.join(kinds)}, not {kind!r}; this model reads text only"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"a content part of type {kind} must have a text that is a string")
    if unknown := part.keys() - {"type", "text"}:
        raise RequestError(f"a content part of type {kind} has no {sorted(map(str, unknown))[0]}")
    return part["text"]
