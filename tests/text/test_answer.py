"""Reasoning and tool calls in one answer."""

from __future__ import annotations

from noria.text.answer import AnswerParser
from noria.text.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta, merged
from noria.text.reasoning.formats import REASONING_FORMATS
from noria.text.tools.hermes import HermesParser

CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>\nI call {CALL}.\n</think>\n\nLet me look.\n{CALL}\n{CALL} Well"


def parser(max_calls: int | None = None) -> AnswerParser:
    return AnswerParser(REASONING_FORMATS["qwen3"].parser("assistant\n"), HermesParser(["now"]), max_calls)


def without_ids(deltas: list[Delta]) -> list[Delta]:
    return [
        CallDelta(delta.index, delta.arguments, delta.name, "id" if delta.id else None)
        if isinstance(delta, CallDelta)
        else delta
        for delta in merged(deltas)
    ]


def test_a_call_that_is_only_thought_of_is_none() -> None:
    whole, pieces = parser(), parser()
    expected = [
        ReasoningDelta(f"I call {CALL}."),
        ContentDelta("Let me look."),
        CallDelta(0, '{"a": 1}', "now", "id"),
        CallDelta(1, '{"a": 1}', "now", "id"),
        ContentDelta("Well"),
    ]
    assert without_ids([*whole.push(ANSWER), *whole.finish()]) == expected
    found = [delta for char in ANSWER for delta in pieces.push(char)]
    assert without_ids([*found, *pieces.finish()]) == expected
    assert whole.has_calls


def test_calls_over_the_limit_are_left_out() -> None:
    limited = parser(1)
    *_, content, call = without_ids([*limited.push(ANSWER), *limited.finish()])
    assert (content, call) == (ContentDelta("Let me look."), CallDelta(0, '{"a": 1}', "now", "id"))


def test_without_parsers_all_is_content() -> None:
    plain = AnswerParser()
    assert [*plain.push(ANSWER), *plain.finish()] == [ContentDelta(ANSWER)]
    assert plain.push("") == []
    assert not plain.has_calls
