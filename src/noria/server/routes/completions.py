"""POST /v1/completions: prompts are continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from noria.engine.client import PreparedPrompt
from noria.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from noria.server import generation
from noria.server.answers import UsageCount, ending, envelope, usage
from noria.server.errors import json_response
from noria.server.generation import Job
from noria.server.ids import new_id
from noria.server.logprobs import CompletionLogprobs, joined
from noria.server.openapi import takes
from noria.server.requests import body_of
from noria.server.schema.completion import CompletionBody
from noria.server.sse import EventStream, answer, event
from noria.server.state import ServerState, State


def completion_routes() -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def completions(
        request: Request, state: State, body: Annotated[CompletionBody, Depends(body_of(CompletionBody))]
    ) -> Response:
        model = state.check_model(body.model)
        job = await generation.prepare(
            state,
            new_id("cmpl"),
            body.prompt,
            body.params,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        writer = _Writer(state, job, body, model)
        if body.stream:
            return EventStream(writer.stream())
        return json_response(await answer(request, writer.whole()))

    return router


class _Writer:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, state: ServerState, job: Job, body: CompletionBody, model: str) -> None:
        self._state = state
        self._job = job
        self._body = body
        self._envelope = envelope(job.request_id, "text_completion", model)
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # by prompt, since they came

    async def whole(self) -> dict[str, Any]:
        results = await generation.collect(self._state, self._job)
        if self._body.only_echoes:
            _drop_answers(results)
        for prompt_index, result in enumerate(results):
            self._keep_prompt_logprobs(prompt_index, result)
        choices = [
            self._choice(prompt_index, output, is_first=True)
            for prompt_index, result in enumerate(results)
            for output in result.outputs
        ]
        return {**self._envelope, "choices": choices, "usage": usage(results)}

    async def stream(self) -> AsyncGenerator[bytes]:
        count, begun = UsageCount(self._job, self._body.stream_options), set[tuple[int, int]]()
        async with aclosing(generation.run(self._state, self._job)) as parts:
            async for prompt_index, part in parts:
                if self._body.only_echoes:
                    _drop_answers([part])
                count.add(prompt_index, part)
                self._keep_prompt_logprobs(prompt_index, part)
                for output in part.outputs:
                    is_first = (prompt_index, output.index) not in begun
                    choice = self._choice(prompt_index, output, is_first=is_first)
                    if choice["text"] or output.finish_reason or choice["logprobs"] or "token_ids" in choice:
                        begun.add((prompt_index, output.index))
                        yield event({**self._envelope, "choices": [choice], **count.so_far})
        if count.is_told:
            yield event({**self._envelope, "choices": [], "usage": count.total})

    def _choice(self, prompt_index: int, output: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        """is_first: of this choice in the answer, so that it begins with what comes once."""
        prompt = self._job.prompts[prompt_index]
        text = self._text_of(prompt) + output.text if is_first and self._body.echo else output.text
        index = prompt_index * self._job.params.n + output.index
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_of(index, prompt_index, output),
            **({"finish_reason": "length", "stop_reason": None} if self._body.only_echoes else ending(output)),
        }
        if self._body.prompt_logprobs is not None and not self._body.stream:
            choice["prompt_logprobs"] = self._prompt_logprobs.get(prompt_index)
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _keep_prompt_logprobs(self, prompt_index: int, part: RequestOutput) -> None:
        if part.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = part.prompt_logprobs

    def _logprobs_of(self, index: int, prompt_index: int, output: CompletionOutput) -> dict[str, Any] | None:
        """Those of the new tokens, and with echo those of the prompt before the first."""
        if output.logprobs is None:
            return None
        if (known := self._logprobs.get(index)) is not None:
            return known.take(output.token_ids, output.logprobs)
        known = self._logprobs[index] = CompletionLogprobs(self._state.engine.tokenizer)
        beginning = None
        if self._body.echo:
            beginning = known.take(self._job.prompts[prompt_index].token_ids, self._prompt_logprobs[prompt_index])
        news = known.take(output.token_ids, output.logprobs)
        return news if beginning is None else joined(beginning, news)

    def _text_of(self, prompt: PreparedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        skip = self._job.params.skip_special_tokens
        return self._state.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)


def _drop_answers(results: Iterable[RequestOutput]) -> None:
    """What is left is the prompt."""
    for result in results:
        result.outputs = [
            CompletionOutput(
                output.index,
                finish_reason=output.finish_reason,
                logprobs=None if output.logprobs is None else [],
            )
            for output in result.outputs
        ]
