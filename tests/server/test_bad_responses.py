"""What /v1/responses refuses, by name, and what it takes because it asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import ask
from responses_client import RESPONSES
from test_refusals import error_of

from noria.text.tokenizer import Tokenizer

GOOD = {"model": "parrot", "input": "why", "max_output_tokens": 4}
TOOL = {"type": "function", "name": "mill", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "mill", "arguments": "{}"}
HI = {"role": "user", "content": "hi"}


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "a"}, fields]}]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": None}, "input must be a string, or a list of items", "input"),
        ({"input": 5}, "input must be a string, or a list of items", "input"),
        ({"input": []}, "input must be a string, or a list of items", "input"),
        ({"input": {"role": "user"}}, "input must be a string, or a list of items", "input"),
        ({"input": ["hi"]}, "an item of the input must be an object", "input[0]"),
        ({"input": [HI, {"content": "x"}]}, "None is not supported", "input[1].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported", "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "['x'] is not supported", "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role: ", "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing", "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content: must be a string", "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content: must be a string", "input[0].content"),
        ({"input": [{**HI, "colour": 1}]}, "input[0].colour is not supported", "input[0].colour"),
        ({"input": [{**HI, "phase": "commentary"}]}, "phase is not supported", "input[0].phase"),
        (
            {"input": part(type="input_image", image_url="x")},
            "not 'input_image'",
            "input[0].content[1]",
        ),
        ({"input": part(type="input_file", file_id="x")}, "not 'input_file'", "input[0].content[1]"),
        ({"input": part(type="output_text", text="x")}, "not 'output_text'", "input[0].content[1]"),
        ({"input": part(type="input_text", text=5)}, "must have a text that is a string", "input[0].content[1]"),
        ({"input": part(type="input_text", text="x", y=1)}, "of type input_text has no y", "input[0].content[1]"),
        ({"input": [HI, {"type": "function_call", "call_id": "c"}]}, "input[1].name is missing", "input[1].name"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments: ", "input[0].arguments"),
        ({"input": [{**CALL, "namespace": "x"}]}, "namespace is not supported", "input[0].namespace"),
        (
            {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            "not 'input_image'",
            "input[1].output[0]",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "d", "output": "x"}, HI]},
            "no function_call before it has the call_id 'd'",
            None,
        ),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]},
            "encrypted_content is not supported",
            "input[0].encrypted_content",
        ),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]},
            "must be of type reasoning_text, not 'text'",
            "input[0].content[0]",
        ),
        ({"instructions": 5}, "instructions: ", "instructions"),
        ({"max_output_tokens": 0}, "must be at least 1", None),
        ({"max_output_tokens": "5"}, "max_output_tokens: ", "max_output_tokens"),
        ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens (4) must not exceed", "min_tokens"),
        ({"temperature": -1}, "temperature must be", "temperature"),
        ({"top_p": 0}, "top_p must be in (0, 1]", "top_p"),
        ({"top_k": -2}, "top_k must be", "top_k"),
        ({"logit_bias": {"500": 1}}, "logit_bias: 500 is not a token id", None),
        ({"n": 2}, "n is not supported", "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported", "prompt_logprobs"),
        ({"stream": "yes"}, "stream: ", "stream"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options is for streams", "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation is not supported",
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x is not supported", "stream_options.x"),
        ({"background": True, "store": False}, "background needs store", "background"),
        ({"background": 1}, "background: ", "background"),
        ({"store": 0}, "store: ", "store"),
        ({"truncation": "auto"}, 'truncation "auto" is not supported', "truncation"),
        ({"truncation": "some"}, "truncation: ", "truncation"),
        ({"include": ["file_search_call.results"]}, "include: 'file_search_call.results' is not supported", "include"),
        ({"top_logprobs": 2}, "top_logprobs needs message.output_text.logprobs in include", "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "logprobs", None),
        ({"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, "logprobs", "logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a: ", "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata must have keys of at most 64 characters", "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata must have keys of at most 64 characters", "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata must have at most 16 pairs, not 17", "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: ", "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "name is missing", "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema is missing", "text.format"),
        (
            {"text": {"format": {"type": "text", "strict": True}}},
            "strict is for a format",
            "text.format",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not supported", "text.verbosity"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary is not supported", "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type web_search is not supported", "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "a tool of type mcp is not supported", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing", "tools[0].name"),
        ({"tools": [{**TOOL, "colour": 1}]}, "tools[0].colour is not supported", "tools[0].colour"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading is not supported", "tools[0].defer_loading"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice 'some' is not supported", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "'web_search' is not supported", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "must have a name", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "there is no tool 'x'", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"messages": [HI]}, "messages is not supported; here it is input", "messages"),
        ({"max_tokens": 5}, "max_tokens is not supported; here it is max_output_tokens", "max_tokens"),
        ({"max_completion_tokens": 5}, "here it is max_output_tokens", "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "here it is text.format", "response_format"),
        ({"logprobs": True}, "here it is include with message.output_text.logprobs", "logprobs"),
        ({"max_output_token": 5}, "did you mean max_output_tokens?", "max_output_token"),
        ({"input": "long " * 400}, "max_model_len (128)", None),
        ({"priority": 3}, "priority needs a server", None),
        ({"cache_salt": ""}, "cache_salt must not be empty", None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not contain messages", None),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort is not supported; leave it out", "reasoning.effort"),
        ({"max_output_tokens": 10**25}, "max_output_tokens must fit 64 bits", None),
        *(
            ({name: value}, f"{name} is not supported", name)
            for name, value in {
                "conversation": "conv_1",
                "prompt": {"id": "x"},
                "max_tool_calls": 3,
                "service_tier": "flex",
                "moderation": {},
                "context_management": [{"type": "compaction"}],
                "prompt_cache_retention": "24h",
                "prompt_cache_options": {"mode": "explicit"},
                "background_options": {},
                "image": {},
                "access_programs": {},
                "best_of": 2,
            }.items()
        ),
    ],
)
def test_a_bad_response(tokenizer: Tokenizer, body: dict[str, Any], message: str, param: str | None) -> None:
    error = error_of(ask(tokenizer, "POST", RESPONSES, json={**GOOD, **body}))
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


def test_values_that_ask_for_nothing_are_accepted(tokenizer: Tokenizer) -> None:
    asked = {
        "n": 1,
        "stream": False,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "include": ["reasoning.encrypted_content"],
        "top_logprobs": 0,
        "service_tier": "auto",
        "metadata": {},
        "previous_response_id": None,
        "conversation": None,
        "max_tokens": None,
        "safety_identifier": "me",
        "prompt_cache_key": "mine",
    }
    answers = [ask(tokenizer, "POST", RESPONSES, json={**GOOD, **more}) for more in (asked, {})]
    texts = [answer.json()["output"][0]["content"] for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert texts[0] == texts[1]


def test_another_model(tokenizer: Tokenizer) -> None:
    error = error_of(ask(tokenizer, "POST", RESPONSES, json={**GOOD, "model": "gpt-9"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
