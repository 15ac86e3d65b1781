"""From the prompts of one HTTP request to the parts of its answers: admission, merging, timing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass

from noria.config import SamplingParams
from noria.engine.client import PreparedPrompt
from noria.engine.outputs import RequestOutput
from noria.errors import NoriaError, RequestError, UnavailableError
from noria.server.metrics import RequestTimer
from noria.server.state import ServerState
from noria.text.answer import AnswerParser


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that were checked and have a place: what is left is to run them."""

    request_id: str  # "cmpl-..." or "chatcmpl-...": the id in the answer, and in the engine's log
    prompts: list[PreparedPrompt]
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    new_parser: Callable[[], AnswerParser] = AnswerParser  # of one answer's text

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def prepare(
    state: ServerState,
    request_id: str,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    *,
    cache_salt: str | None = None,
    priority: int | None = None,
) -> Job:
    """Raises RequestError for what cannot be served, and UnavailableError when nothing can be now."""
    state.check_open()
    engine = state.engine
    engine.check_room(len(prompts) * params.n)
    if priority is not None and not -(2**63) <= priority < 2**63:
        raise RequestError("priority must fit 64 bits")
    if priority and engine.facts is not None and engine.facts.scheduling_policy != "priority":
        raise RequestError('priority needs a server that was started with --scheduling-policy "priority"; leave it out')
    if cache_salt == "":
        raise RequestError("cache_salt must not be empty; leave it out")
    prepared = []
    for prompt in prompts:
        prepared.append(await engine.prepare(prompt, params))
        await asyncio.sleep(0)  # between the prompts of a long list others get their turn
    return Job(request_id, prepared, params, cache_salt, priority or 0)


async def run(state: ServerState, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yields (index of the prompt, what is new of its answer) until all answers are whole.

    Leaving the loop (close the generator!) aborts what still runs. Raises what EngineClient.generate raises, and
    UnavailableError when an answer was aborted by the server's end or by its operator.
    """
    if len(job.prompts) == 1:
        async with aclosing(_run_one(state, job, 0)) as parts:
            async for part in parts:
                yield 0, part
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_feed(queue, state, job, index)) for index in range(len(job.prompts))]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None], state: ServerState, job: Job, index: int
) -> None:
    try:
        async with aclosing(_run_one(state, job, index)) as parts:
            async for part in parts:
                queue.put_nowait((index, part))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def _run_one(state: ServerState, job: Job, index: int) -> AsyncGenerator[RequestOutput]:
    timer = RequestTimer(state.metrics, job.params)
    tracing = nullcontext() if state.tracing is None else state.tracing.request(job.request_id, job.params)
    parts = state.engine.generate(
        job.prompts[index],
        job.params,
        f"{job.request_id}-{index}",
        cache_salt=job.cache_salt,
        priority=job.priority,
        timeout_s=state.config.request_timeout,
    )
    with tracing as span:
        async with aclosing(parts):
            async for part in parts:
                timer.see(part)
                if span is not None:
                    span.see(part)
                _check(part)
                yield part


def _check(part: RequestOutput) -> None:
    """Raises what is told of an answer that did not end by itself."""
    for output in part.outputs:
        if output.finish_reason == "error" and isinstance(output.stop_reason, str):
            raise RequestError(output.stop_reason)  # what it asked for turned out to be too much
        if output.finish_reason == "error":
            raise NoriaError("the request failed while it ran; the server's log says why")
        if output.finish_reason == "abort":
            raise UnavailableError("the request was aborted by the server")


async def collect(state: ServerState, job: Job) -> list[RequestOutput]:
    """The whole answers, one for each prompt. Cancelling aborts what still runs."""
    results: dict[int, RequestOutput] = {}
    async with aclosing(run(state, job)) as parts:
        async for index, part in parts:
            if index in results:
                results[index].add(part)
            else:
                results[index] = part
    return [results[index] for index in range(len(job.prompts))]
