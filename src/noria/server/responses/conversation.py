"""From the items of a conversation to a request as /v1/chat/completions knows it, which then goes the same way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from noria.errors import RequestError
from noria.server.errors import ApiError
from noria.server.schema.base import describe_invalid
from noria.server.schema.chat import ChatBody
from noria.server.schema.items import Item
from noria.server.schema.responses import ResponseBody

# Of a response itself, or under another name or in another shape in chats.
_OWN = frozenset({"stream", "stream_options", "user", "store", "metadata", "tools", "tool_choice", "reasoning"})
_SHARED = tuple(sorted((ResponseBody.model_fields.keys() & ChatBody.model_fields.keys()) - _OWN))
# What complaints call these.
_NAMES = (
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\bresponse_format\b(\.json_schema)?", "text.format"),
    (r"\bmessages(?=\[|:)|^messages$", "input"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
)


def as_chat(body: ResponseBody, items: Sequence[Item]) -> ChatBody:
    """items: the whole conversation. Raises ApiError 400 and RequestError, in the terms of chats."""
    shared = {name: getattr(body, name) for name in _SHARED}
    own = {
        "messages": [*_system(body), *messages_of(items)],
        "max_completion_tokens": body.max_output_tokens,
        "response_format": body.format.response_format(),
        "logprobs": True if body.with_logprobs else None,
        "top_logprobs": body.top_logprobs if body.with_logprobs else None,
        "tools": [tool.for_chat() for tool in body.tools or ()],
        "tool_choice": _tool_choice(body.tool_choice),
    }
    content = {name: value for name, value in {**shared, **own}.items() if value is not None and value != []}
    try:
        return ChatBody.model_validate(content)
    except ValidationError as error:
        message, param = describe_invalid(error, ChatBody)
        raise ApiError(400, message, param=param) from None


@contextlib.contextmanager
def in_own_terms() -> Iterator[None]:
    """Raises complaints about a chat anew, `renamed`."""
    try:
        yield
    except ApiError as error:
        if error.status != 400:
            raise
        param = error.param and renamed(error.param)
        raise ApiError(400, renamed(error.message), param=param, code=error.code) from None
    except RequestError as error:
        raise RequestError(renamed(str(error))) from None


def renamed(text: str) -> str:
    """A complaint about a chat with the names that its parameters have here."""
    for theirs, ours in _NAMES:
        text = re.sub(theirs, ours, text)
    return text


def _system(body: ResponseBody) -> list[Item]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Messages of a chat. What an assistant thought, said and called in one turn is one message there.

    Raises RequestError for the output of a call that nobody made.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that may still grow
    called: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            turn = None
            messages.append(_said(item, called))
            continue
        if turn is None or not _goes_on(turn, kind):
            turn = {"role": "assistant"}
            messages.append(turn)
        if kind == "reasoning":
            turn["reasoning_content"] = "".join(part["text"] for part in item["content"])
        elif kind == "message":
            turn["content"] = _text(item)
        else:
            called.add(item["call_id"])
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return [_whole(message) for message in messages if message.keys() & {"content", "tool_calls"}]


def _said(item: Item, called: set[str]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _text(item)}
    if item["call_id"] not in called:
        raise RequestError(f"input: no function_call before it has the call_id {item['call_id']!r:.80} of an output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}


def _goes_on(turn: Mapping[str, Any], kind: str) -> bool:
    """Thoughts come before words, and words before calls; more calls are the same turn."""
    if kind == "function_call":
        return True
    return not turn.keys() & ({"content", "tool_calls"} if kind == "message" else {"content", "tool_calls", kind})


def _whole(message: dict[str, Any]) -> dict[str, Any]:
    """A message that only calls has no content."""
    reasoning = message.get("reasoning_content")
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {"content": None, **rest, **({"reasoning_content": reasoning} if reasoning else {})}


def _text(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"])
