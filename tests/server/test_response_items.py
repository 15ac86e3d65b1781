"""Items in and out of /v1/responses: deltas to events, and conversations to the messages of chats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from responses_client import check_order

from noria.errors import RequestError
from noria.server.responses.conversation import as_chat, messages_of
from noria.server.responses.output import OutputItems
from noria.server.schema.chat import ChatBody
from noria.server.schema.items import _input
from noria.server.schema.responses import ResponseBody
from noria.text.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def told(deltas: list[Delta], status: Any = "completed") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items of an answer, and its events, which are in order."""
    output = OutputItems(with_logprobs=False)
    events = [json.loads(json.dumps(event)) for delta in deltas for event in output.take(delta)]
    events += output.finish(status)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    begin = [{"type": f"response.{name}", "response": {"status": "in_progress"}} for name in ("created", "in_progress")]
    check_order([*begin, *events, {"type": "response.completed", "response": {"output": output.items}}])
    return output.items, events


def test_thoughts_words_and_calls_are_items_of_their_own() -> None:
    mill_call = [CallDelta(0, "", "mill", "c0"), CallDelta(0, '{"a"'), CallDelta(0, ": 1}")]
    deltas = [ReasoningDelta("hm"), ReasoningDelta("m"), ContentDelta("I "), ContentDelta("call"), *mill_call]
    items, events = told([*deltas, CallDelta(1, "{}", "saw", "c1"), ContentDelta("done")])
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call", "message"]
    thought, words, mill, saw, last = items
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert thought["summary"] == []
    assert words["content"] == [{"type": "output_text", "text": "I call", "annotations": []}]
    assert (mill["call_id"], mill["name"], mill["arguments"]) == ("c0", "mill", '{"a": 1}')
    assert (saw["call_id"], saw["name"], saw["arguments"]) == ("c1", "saw", "{}")
    assert last["content"][0]["text"] == "done"
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items}) == 5
    first = [event for event in events if event["output_index"] == 2]
    assert [event["type"].removeprefix("response.") for event in first] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


@pytest.mark.parametrize(
    "delta",
    [ContentDelta("cut"), ReasoningDelta("cut"), CallDelta(0, '{"a', "mill", "c0")],
    ids=["text", "why", "call"],
)
def test_only_the_last_item_was_cut_off(delta: Delta) -> None:
    items, _ = told([CallDelta(5, "{}", "saw", "c1"), delta], "incomplete")
    assert [item["status"] for item in items] == ["completed", "incomplete"]


def conversation(*items: Any) -> list[dict[str, Any]]:
    return messages_of(_input(list(items)))


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c_{name}", "name": name, "arguments": arguments}


def result(name: str, output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c_{name}", "output": output}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


USER = {"role": "user", "content": "why"}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]}


def chat_call(name: str) -> dict[str, Any]:
    return {"id": f"c_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_one_turn_is_one_message() -> None:
    parts = [{"type": "input_text", "text": "5"}, {"type": "input_text", "text": "6"}]
    found = conversation(
        USER, thought("hm"), SAID, call("mill"), call("saw"), result("mill"), result("saw", parts), SAID
    )
    assert found == [
        {"role": "user", "content": "why"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [chat_call("mill"), chat_call("saw")],
        },
        {"role": "tool", "tool_call_id": "c_mill", "content": "5"},
        {"role": "tool", "tool_call_id": "c_saw", "content": "5\n6"},
        {"role": "assistant", "content": "so"},
    ]


def test_turns_that_follow_each_other_stay_apart() -> None:
    found = conversation(USER, SAID, SAID, call("mill"), thought("hm"), call("saw"))
    assert [message.get("content") for message in found] == ["why", "so", "so", None]
    assert [len(message.get("tool_calls", ())) for message in found] == [0, 0, 1, 1]
    assert found[-1]["reasoning_content"] == "hm"


def test_thoughts_without_an_answer_are_dropped() -> None:
    summary = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert conversation(USER, thought("hm"), USER) == [{"role": "user", "content": "why"}] * 2
    assert conversation(summary, SAID) == [{"role": "assistant", "content": "so"}]


@pytest.mark.parametrize("items", [[result("mill")], [result("mill"), call("mill")]])
def test_an_output_needs_its_call(items: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="no function_call before it has the call_id 'c_mill'"):
        conversation(USER, *items)


def test_parameters_mean_what_they_mean_in_chats() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 1.5},
        "bad_words": ["mill"],
        "bad_token_ids": [8],
        "allowed_token_ids": [8, 9],
        "min_tokens": 2,
        "stop": "end",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "guided_choice": ["a", "b"],
    }
    body = ResponseBody.model_validate({"input": "why", "max_output_tokens": 5, **given})
    chat = {"messages": [{"role": "user", "content": "why"}], "max_completion_tokens": 5, **given}
    assert as_chat(body, body.input).params == ChatBody.model_validate(chat).params
