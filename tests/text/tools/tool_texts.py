"""Answers of models in each format, cut into pieces and put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from noria.text.deltas import CallDelta, ContentDelta, Delta
from noria.text.tools.base import ToolParser

TOOLS = ("get_weather", "now", "geo.find")


@dataclass
class Read:
    """What a client has at the end."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, text of the arguments


def read(parser: ToolParser, pieces: Iterable[str]) -> Read:
    """As a client does it, with a look at the contract: a name once and first, indices in order."""
    found = Read()
    for deltas in [*map(parser.push, pieces), parser.finish()]:
        add(found, deltas)
    assert parser.num_calls == len(found.calls)
    return found


def add(found: Read, deltas: list[Delta]) -> None:
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                found.content += text
            case CallDelta(index, arguments, None, None):
                assert index == len(found.calls) - 1
                name, before = found.calls[index]
                found.calls[index] = (name, before + arguments)
            case CallDelta(index, arguments, str(name), str(call_id)):
                assert call_id
                assert index == len(found.calls)
                found.calls.append((name, arguments))
            case _:
                raise AssertionError(delta)


def cut(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def read_whole(kind: type[ToolParser], text: str) -> Read:
    """The text in one piece, which every way to cut it must agree with: character by character, in bursts of 4, and
    in two at each place."""
    whole = read(kind(TOOLS), [text])
    assert read(kind(TOOLS), text) == whole
    assert read(kind(TOOLS), cut(text, 4)) == whole
    for place in range(1, len(text)):
        assert read(kind(TOOLS), [text[:place], text[place:]]) == whole
    return whole
