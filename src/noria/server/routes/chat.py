"""POST /v1/chat/completions: conversations are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from noria.engine.outputs import CompletionOutput
from noria.server import generation
from noria.server.answers import UsageCount, ending, envelope, usage
from noria.server.errors import json_response
from noria.server.generation import Job
from noria.server.ids import new_id
from noria.server.logprobs import for_chat
from noria.server.openapi import takes
from noria.server.requests import body_of
from noria.server.schema.chat import ChatBody, ConversationBody
from noria.server.sse import EventStream, answer, event
from noria.server.state import ServerState, State
from noria.text.chat import encode_chat


async def encode_conversation(state: ServerState, body: ConversationBody) -> list[int]:
    """Token ids of the rendered template. In a thread: templates are programs, and conversations may be long.

    Raises RequestError.
    """
    return await asyncio.to_thread(
        encode_chat, state.engine.tokenizer, body.template_messages(), **body.template_options()
    )


async def prepare_chat(state: ServerState, request_id: str, body: ChatBody) -> Job:
    """Raises what encode_conversation and generation.prepare raise."""
    prompt = await encode_conversation(state, body)
    return await generation.prepare(
        state, request_id, [prompt], body.params, cache_salt=body.cache_salt, priority=body.priority
    )


def chat_routes() -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
    async def chat_completions(
        request: Request, state: State, body: Annotated[ChatBody, Depends(body_of(ChatBody))]
    ) -> Response:
        model = state.check_model(body.model)
        job = await prepare_chat(state, new_id("chatcmpl"), body)
        writer = _Writer(state, job, body, model)
        if body.stream:
            return EventStream(writer.stream())
        return json_response(await answer(request, writer.whole()))

    return router


class _Writer:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, state: ServerState, job: Job, body: ChatBody, model: str) -> None:
        self._state = state
        self._job = job
        self._body = body
        self._model = model

    async def whole(self) -> dict[str, Any]:
        results = await generation.collect(self._state, self._job)
        [result] = results
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text},
                "logprobs": self._logprobs(output),
                **ending(output),
                **self._token_ids(output, is_first=True),
            }
            for output in result.outputs
        ]
        head = envelope(self._job.request_id, "chat.completion", self._model)
        of_prompt = {} if result.prompt_logprobs is None else {"prompt_logprobs": result.prompt_logprobs}
        return {**head, "choices": choices, "usage": usage(results), **of_prompt}

    async def stream(self) -> AsyncGenerator[bytes]:
        head = envelope(self._job.request_id, "chat.completion.chunk", self._model)
        with_usage = self._body.stream_options is not None and bool(self._body.stream_options.include_usage)
        no_usage = {"usage": None} if with_usage else {}
        count, begun = UsageCount(self._job), set[int]()
        async with aclosing(generation.run(self._state, self._job)) as parts:
            async for index, part in parts:
                count.add(index, part)
                for output in part.outputs:
                    is_first = output.index not in begun
                    begun.add(output.index)
                    if (choice := self._chunk(output, is_first=is_first)) is not None:
                        yield event({**head, "choices": [choice], **no_usage})
        if with_usage:
            yield event({**head, "choices": [], "usage": count.total})

    def _chunk(self, output: CompletionOutput, *, is_first: bool) -> dict[str, Any] | None:
        """None when there is nothing to tell: a character is not whole, or may be the beginning of a stop string."""
        delta = {"role": "assistant", "content": output.text} if is_first else {"content": output.text}
        logprobs = self._logprobs(output)
        if not (output.text or is_first or output.finish_reason or logprobs or self._body.return_token_ids):
            return None
        token_ids = self._token_ids(output, is_first=is_first)
        return {"index": output.index, "delta": delta, "logprobs": logprobs, **ending(output), **token_ids}

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        return for_chat(output, self._state.engine.tokenizer, self._body.num_top)

    def _token_ids(self, output: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._job.prompts[0].token_ids} if is_first else {}
        return {"token_ids": output.token_ids, **prompt}
