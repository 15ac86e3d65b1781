"""From the body of a chat to a prompt, what its answer must be, and how that is read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from noria.config import SamplingParams
from noria.errors import RequestError
from noria.server import generation
from noria.server.errors import ApiError
from noria.server.generation import Job
from noria.server.schema.chat import ChatBody, ConversationBody
from noria.server.state import ServerState
from noria.server.structuring import structured
from noria.text.answer import AnswerParser
from noria.text.chat import render_chat
from noria.text.reasoning.base import ReasoningFormat
from noria.text.tokenizer import Tokenizer
from noria.text.tools.base import ToolParser
from noria.text.tools.forced import ForcedParser


async def encode_conversation(state: ServerState, body: ConversationBody) -> list[int]:
    """Token ids of the rendered template. In a thread: templates are programs, and conversations may be long.

    Raises RequestError and ApiError.
    """
    tokenizer = state.engine.tokenizer
    return await asyncio.to_thread(lambda: _encode(tokenizer, _render(tokenizer, body)))


async def prepare_chat(state: ServerState, request_id: str, body: ChatBody) -> Job:
    """Raises what encode_conversation and generation.prepare raise."""
    prompt, params, new_parser = await asyncio.to_thread(_prepare, state, body)
    job = await generation.prepare(
        state, request_id, [prompt], params, cache_salt=body.cache_salt, priority=body.priority
    )
    return dataclasses.replace(job, new_parser=new_parser)


def _prepare(state: ServerState, body: ChatBody) -> tuple[list[int], SamplingParams, Callable[[], AnswerParser]]:
    dialect, tokenizer = state.dialect, state.engine.tokenizer
    text = _render(tokenizer, body)
    tools = _tool_parser(state, body) if body.offered_tools else None
    thinking = "never" if dialect.reasoning is None else dialect.reasoning.thinking(text)
    shows_special = (tools is not None and dialect.has_special_calls) or dialect.has_special_reasoning
    params = dataclasses.replace(
        body.params,
        structured_outputs=structured(body, dialect, thinking),
        skip_special_tokens=body.params.skip_special_tokens and not shows_special,
    )
    names = [tool.function.name for tool in body.offered_tools]
    max_calls = 1 if body.parallel_tool_calls is False else None
    return _encode(tokenizer, text), params, partial(_parser, dialect.reasoning, text, tools, names, max_calls)


def _parser(
    reasoning: ReasoningFormat | None,
    prompt: str,
    tools: type[ToolParser] | None,
    names: Sequence[str],
    max_calls: int | None,
) -> AnswerParser:
    """For one answer."""
    return AnswerParser(reasoning and reasoning.parser(prompt), tools and tools(names), max_calls)


def _tool_parser(state: ServerState, body: ChatBody) -> type[ToolParser]:
    """Raises ApiError when the model is to decide about calls and nobody could tell that it did."""
    dialect = state.dialect
    if body.choice != "auto":
        return ForcedParser if dialect.tool_parser is None or dialect.spelling is None else dialect.tool_parser
    if not state.config.enable_auto_tool_choice:
        message = "this server was started with --no-enable-auto-tool-choice"
        raise ApiError(400, f'tool_choice "auto" is not possible: {message}; name a tool', param="tool_choice")
    if dialect.tool_parser is None:
        raise ApiError(
            400,
            'tool_choice "auto" is not possible: how this model writes tool calls is not recognized by its chat '
            "template; start the server with --tool-call-parser, or use tool_choice required",
            param="tool_choice",
        )
    return dialect.tool_parser


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _render(tokenizer: Tokenizer, body: ConversationBody) -> str:
    """Raises ApiError when there are tools and the template has no place for them."""
    tools = body.template_tools() or None
    text = _render_with(tokenizer, body, tools)
    if tools and text == _render_with(tokenizer, body, None):
        raise ApiError(
            400,
            "tools: the chat template of this model has no place for tools, so the model would not know of them; use a "
            "model that was made for tool calls, start the server with --chat-template, or leave tools out",
            param="tools",
        )
    return text


def _render_with(tokenizer: Tokenizer, body: ConversationBody, tools: list[dict[str, Any]] | None) -> str:
    """Most templates take the arguments of earlier calls as objects, and some only as text."""
    options = {"tools": tools, **body.template_options()}
    try:
        return render_chat(tokenizer, body.template_messages(), **options)
    except RequestError:
        if not body.has_calls:
            raise
        try:
            return render_chat(tokenizer, body.template_messages(arguments_as_text=True), **options)
        except RequestError:
            pass
        raise
