"""What is in an answer, in the shapes of the chat API: a message, or the deltas of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from noria.text.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Content is null where there are only calls, or only reasoning."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta) and delta.name is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        elif isinstance(delta, CallDelta):
            calls[delta.index]["function"]["arguments"] += delta.arguments
    content, reasoning = _content(deltas), _reasoning(deltas)
    return {
        "role": "assistant",
        "content": content or (None if calls or reasoning else ""),
        **reasoning,
        **({"tool_calls": calls} if calls else {}),
    }


def message_delta(deltas: Sequence[Delta], *, is_first: bool) -> dict[str, Any]:
    """Of one chunk; the first one of an answer tells the role."""
    calls = [_call(delta) for delta in deltas if isinstance(delta, CallDelta)]
    content, reasoning = _content(deltas), _reasoning(deltas)
    shows_content = content or is_first or not (calls or reasoning)
    return {
        **({"role": "assistant"} if is_first else {}),
        **({"content": content} if shows_content else {}),
        **reasoning,
        **({"tool_calls": calls} if calls else {}),
    }


def _content(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def _reasoning(deltas: Iterable[Delta]) -> dict[str, str]:
    """Under the name that vLLM has for it now, and the older one that many clients read."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(delta: CallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
