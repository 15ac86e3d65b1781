"""POST /v1/chat/completions: conversations are answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from noria.engine.outputs import CompletionOutput
from noria.server import generation
from noria.server.answers import UsageCount, ending, envelope, usage
from noria.server.conversation import prepare_chat
from noria.server.errors import json_response
from noria.server.generation import Job
from noria.server.ids import new_id
from noria.server.logprobs import for_chat
from noria.server.messages import message_delta, whole_message
from noria.server.openapi import takes
from noria.server.requests import body_of
from noria.server.schema.chat import ChatBody
from noria.server.sse import EventStream, answer, event
from noria.server.state import ServerState, State
from noria.text.answer import AnswerParser
from noria.text.deltas import Delta, ReasoningDelta


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
        self._parsers: dict[int, AnswerParser] = {}  # by choice

    async def whole(self) -> dict[str, Any]:
        results = await generation.collect(self._state, self._job)
        [result] = results
        choices = [
            {
                "index": output.index,
                "message": whole_message(self._read(output)),
                "logprobs": self._logprobs(output),
                **self._ending(output),
                **self._token_ids(output, is_first=True),
            }
            for output in result.outputs
        ]
        head = envelope(self._job.request_id, "chat.completion", self._model)
        of_prompt = {} if result.prompt_logprobs is None else {"prompt_logprobs": result.prompt_logprobs}
        return {**head, "choices": choices, "usage": usage(results), **of_prompt}

    async def stream(self) -> AsyncGenerator[bytes]:
        head = envelope(self._job.request_id, "chat.completion.chunk", self._model)
        count = UsageCount(self._job, self._body.stream_options)
        async with aclosing(generation.run(self._state, self._job)) as parts:
            async for index, part in parts:
                count.add(index, part)
                for output in part.outputs:
                    if (choice := self._chunk(output)) is not None:
                        yield event({**head, "choices": [choice], **count.so_far})
        if count.is_told:
            yield event({**head, "choices": [], "usage": count.total})

    def _chunk(self, output: CompletionOutput) -> dict[str, Any] | None:
        """None when there is nothing to tell: a character is not whole, or may be the beginning of something else."""
        is_first = output.index not in self._parsers
        deltas = self._read(output)
        logprobs = self._logprobs(output)
        if not (deltas or is_first or output.finish_reason or logprobs or self._body.return_token_ids):
            return None
        return {
            "index": output.index,
            "delta": message_delta(deltas, is_first=is_first),
            "logprobs": logprobs,
            **self._ending(output),
            **self._token_ids(output, is_first=is_first),
        }

    def _read(self, output: CompletionOutput) -> list[Delta]:
        """What the text of a part means, after what came before."""
        if (parser := self._parsers.get(output.index)) is None:
            parser = self._parsers[output.index] = self._job.new_parser()
        deltas = parser.push(output.text)
        if output.finish_reason is not None:
            deltas += parser.finish()
        if self._body.include_reasoning is False:
            return [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        return deltas

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        """An answer that was cut off was, whatever is in it."""
        told = ending(output)
        if told["finish_reason"] == "stop" and self._parsers[output.index].has_calls:
            told["finish_reason"] = "tool_calls"
        return told

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        return for_chat(output, self._state.engine.tokenizer, self._body.num_top)

    def _token_ids(self, output: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._job.prompts[0].token_ids} if is_first else {}
        return {"token_ids": output.token_ids, **prompt}
