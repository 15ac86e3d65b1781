"""What the answer of a chat must be: its tool choice, its response format, and the room to think before either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from noria.config import StructuredOutputsParams
from noria.server.dialect import Dialect
from noria.server.errors import ApiError
from noria.server.schema.chat import ChatBody
from noria.text.reasoning.base import Thinking
from noria.text.tools.forced import FORCED_SPELLING
from noria.text.tools.structure import Node, Tool, after_reasoning, calls, either, text_with_calls


def structured(body: ChatBody, dialect: Dialect, thinking: Thinking) -> StructuredOutputsParams | None:
    """None when the answer may be any text. Raises ApiError for what does not go together."""
    asked = body.params.structured_outputs
    functions = [tool.function for tool in body.offered_tools]
    tools = [Tool(function.name, function.parameters, bool(function.strict)) for function in functions]
    if not tools:
        if asked is None or not _leaves_room(asked, thinking):
            return asked
        node = _node(asked)
    elif body.choice == "auto":
        node = _unasked(tools, asked, dialect, parallel=body.parallel_tool_calls is not False)
        if node is None:
            return None
    else:
        if asked is not None:
            raise ApiError(
                400,
                f"a tool_choice that makes the model call leaves no room for structured output ({asked.kind}); "
                "leave one of them out",
                param="tool_choice",
            )
        chosen = [tool for tool in tools if body.named_tool in (None, tool.name)]
        parallel = body.named_tool is None and body.parallel_tool_calls is not False
        node = calls(dialect.spelling or FORCED_SPELLING, chosen, parallel=parallel)
    tag = {"format": after_reasoning(node, dialect.reasoning, thinking)}
    compact = asked is not None and asked.disable_any_whitespace
    return StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=compact)


def _unasked(
    tools: Sequence[Tool], asked: StructuredOutputsParams | None, dialect: Dialect, *, parallel: bool
) -> Node | None:
    """The model decides about calls. None: free text."""
    spelling = dialect.spelling
    if asked is not None:
        if spelling is None or spelling.looks_like_json or asked.kind not in ("json", "json_object"):
            raise ApiError(
                400,
                f"tools and structured output ({asked.kind}) do not go together with the tool format "
                f"{dialect.tool_format}; leave one of them out, or set tool_choice to none or required",
                param="tools",
            )
        return either(calls(spelling, tools, parallel=parallel), _node(asked))
    strict = next((index for index, tool in enumerate(tools) if tool.strict), None)
    if strict is None:
        return None
    if spelling is None or not spelling.trigger:
        raise ApiError(
            400,
            f"strict is not possible with the tool format {dialect.tool_format} unless tool_choice is required or "
            "names a tool; leave it out",
            param=f"tools[{strict}].function.strict",
        )
    return text_with_calls(spelling, tools)


def _node(asked: StructuredOutputsParams) -> Node:
    """Structured output as part of a structural tag."""
    match asked.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _schema(asked.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": asked.regex}
        case _:
            return either(*({"type": "const_string", "value": text} for text in asked.choice or ()))


def _leaves_room(asked: StructuredOutputsParams, thinking: Thinking) -> bool:
    """Whether the model can think before. Grammars and structural tags say everything themselves, and a pattern may
    match the mark that reasoning begins with."""
    if asked.kind == "regex":
        return thinking == "begun"
    return thinking != "never" and asked.kind in ("json", "json_object", "choice")


def _schema(text: Any) -> Mapping[str, Any]:
    """Raises ApiError. Depth and keywords are looked at when the grammar is compiled."""
    try:
        schema = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise ApiError(400, "structured output (json) needs a JSON schema, which is an object", param="response_format")
    return schema
