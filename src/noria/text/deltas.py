"""What a model's text is made of, in pieces: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of what the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The next piece of a tool call. The first one of a call, and no other, brings its id and name."""

    index: int  # of the call in the answer, from 0
    arguments: str = ""  # a piece of JSON text; the pieces of a call that is complete are one JSON object
    name: str | None = None
    id: str | None = None


Delta = ContentDelta | ReasoningDelta | CallDelta


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind, and of one call, become one; empty texts vanish. The order stays."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        match last, delta:
            case (ContentDelta(), ContentDelta()) | (ReasoningDelta(), ReasoningDelta()):
                found[-1] = replace(last, text=last.text + delta.text)
            case (CallDelta(index=index), CallDelta(name=None)) if index == delta.index:
                found[-1] = replace(last, arguments=last.arguments + delta.arguments)
            case _, (ContentDelta(text="") | ReasoningDelta(text="")):
                pass
            case _:
                found.append(delta)
    return found
