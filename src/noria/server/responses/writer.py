"""Writes one response: what the engine generates becomes typed events, the last of which is the whole response."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from noria.engine.outputs import RequestOutput
from noria.errors import RequestError
from noria.server import generation
from noria.server.errors import ApiError, api_error
from noria.server.generation import Job
from noria.server.logprobs import for_chat
from noria.server.responses.conversation import renamed
from noria.server.responses.output import Event, OutputItems
from noria.server.responses.store import Record
from noria.server.schema.responses import ResponseBody
from noria.server.state import ServerState
from noria.text.deltas import ContentDelta, Delta, ReasoningDelta

# What the API calls failures, by the status that they would have had before the first event.
_CODES: Mapping[int, str] = MappingProxyType({400: "invalid_prompt", 429: "rate_limit_exceeded"})


def begun(response_id: str, body: ResponseBody, model: str, *, store: bool) -> dict[str, Any]:
    """A response of which there is nothing yet but what was asked for."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": body.format.echo()},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.echo() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


class ResponseWriter:
    """For one use of `events`."""

    def __init__(self, state: ServerState, job: Job, body: ResponseBody, record: Record) -> None:
        self._state = state
        self._job = job
        self._record = record
        self._parser = job.new_parser()
        self._num_top = body.top_logprobs or 0
        self._items = OutputItems(with_logprobs=body.with_logprobs)
        self._waiting: list[Any] = []  # log-probabilities of tokens whose text is held back
        self._num_waiting = 0  # such tokens
        self._num_cached = self._num_output = self._num_reasoning = 0
        self._was_cut = False
        self.error: ApiError | None = None  # why it failed

    async def events(self) -> AsyncGenerator[Event]:
        """Ends with response.completed, .incomplete or .failed; the record's response is then as in that event.

        Raises nothing: what goes wrong is told in the last event, and kept in `error`.
        """
        numbers = itertools.count()
        async with aclosing(self._unnumbered()) as events:
            async for each in events:
                yield {"type": each["type"], "sequence_number": next(numbers), **each}

    async def _unnumbered(self) -> AsyncGenerator[Event]:
        self._record.response["output"] = self._items.items  # whoever asks for it meanwhile sees what there is
        yield self._about("response.created")
        yield self._about("response.in_progress")
        try:
            async with aclosing(generation.run(self._state, self._job)) as parts:
                async for _, part in parts:
                    for event in self._take(part):
                        yield event
            for event in self._finish():
                yield event
        except Exception as error:
            self.error = api_error(error if not isinstance(error, RequestError) else RequestError(renamed(str(error))))
            code = _CODES.get(self.error.status, "server_error")
            yield self._end("failed", error={"code": code, "message": self.error.message})
        else:
            details = {"reason": "max_output_tokens"} if self._was_cut else None
            yield self._end("incomplete" if self._was_cut else "completed", incomplete_details=details)

    def _take(self, part: RequestOutput) -> Iterator[Event]:
        self._num_cached = part.num_cached_tokens
        for output in part.outputs:
            self._num_output += len(output.token_ids)
            self._was_cut = output.finish_reason == "length"
            if (logprobs := for_chat(output, self._state.engine.tokenizer, self._num_top)) is not None:
                self._waiting += logprobs["content"]
            self._num_waiting += len(output.token_ids)
            yield from self._tell(self._parser.push(output.text))

    def _finish(self) -> Iterator[Event]:
        yield from self._tell(self._parser.finish())
        yield from self._items.finish("incomplete" if self._was_cut else "completed", self._waiting)

    def _tell(self, deltas: list[Delta]) -> Iterator[Event]:
        """Tokens belong to the first delta that they lead to, marks around reasoning and calls included. Their
        log-probabilities are told with content, and with nothing else."""
        for delta in deltas:
            logprobs, self._waiting = self._waiting, []
            num_tokens, self._num_waiting = self._num_waiting, 0
            if isinstance(delta, ReasoningDelta):
                self._num_reasoning += num_tokens
            yield from self._items.take(delta, logprobs if isinstance(delta, ContentDelta) else ())

    def _end(self, status: str, **changes: Any) -> Event:
        completed = {"completed_at": int(time.time())} if status == "completed" else {}
        self._record.response.update(status=status, usage=self._usage, **completed, **changes)
        self._state.responses.settle(self._record)
        return self._about(f"response.{status}")

    def _about(self, kind: str) -> Event:
        return {"type": kind, "response": self._record.response}

    @property
    def _usage(self) -> dict[str, Any]:
        num_input = self._job.num_prompt_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + self._num_output,
        }
