"""A batch is answered by the application of the server, without a socket: a body means the same as over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from noria.config import EngineConfig
from noria.engine.client import EngineClient
from noria.errors import EngineDeadError
from noria.server.app import create_app
from noria.server.batch.files import Input, Output
from noria.server.batch.lines import Line, refusal, result, tokens_of
from noria.server.metrics import ServerMetrics
from noria.server.settings import ServerConfig
from noria.server.state import ServerState
from noria.text.tokenizer import load_tokenizer

_POLL_S = 0.02
_LAST_WORDS_S = 15.0  # until the end of a dead engine is known
_ANY_NUMBER = 1 << 40  # of sequences that may wait: what is in flight is limited here


@dataclass
class Tally:
    """What was done, not counting what had been done before."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def lines(self) -> int:
        return self.answered + self.failed


async def run_batch(
    config: EngineConfig,
    names: Sequence[str],
    source: Input,
    output: Output,
    *,
    max_concurrency: int | None = None,
    note: Callable[[str], None],
    progress: Callable[[int], None] = lambda done: None,
) -> Tally:
    """Starts an engine, answers the lines that `output` lacks, and ends the engine.

    config: its model is a path on this machine. names: what bodies may call the model. max_concurrency: lines at a
    time; twice as many as the engine has seats when None. progress: told the number of lines that have a result.
    Raises ConfigError or WeightsError when the engine cannot start, EngineDeadError when it dies; whatever was written
    until then stays.
    """
    tokenizer = load_tokenizer(Path(config.tokenizer or config.model), config.chat_template)
    # Silence is no reason to refuse anything: nobody else could take the work.
    engine = EngineClient(
        config, tokenizer, timeout_s=math.inf, max_queued_requests=_ANY_NUMBER, restart=False, progress=note
    )
    state = ServerState(engine, ServerConfig(), tuple(names), config.model, ServerMetrics(engine, names[0]))
    running = asyncio.ensure_future(engine.run())
    try:
        while engine.facts is None and not running.done():
            await asyncio.sleep(_POLL_S)
        if engine.facts is None:
            running.result()
            raise EngineDeadError("the engine has ended before it was ready")
        most = min(max_concurrency or 2 * engine.facts.max_num_seqs, len(source.keys))
        transport = httpx.ASGITransport(app=create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
            return await answer_all(http, source.lines(output.done), output, most, progress)
    except EngineDeadError:
        await asyncio.wait({running}, timeout=_LAST_WORDS_S)
        if running.done():
            running.result()  # raises what the engine itself ended with
        raise
    finally:
        await engine.close()
        await asyncio.gather(running, return_exceptions=True)


async def answer_all(
    http: httpx.AsyncClient,
    lines: Iterable[Line],
    output: Output,
    max_concurrency: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Tally:
    """Asks `http` for each line, so many at a time. Raises EngineDeadError when nothing can be answered any more."""
    left, tally, begin = iter(lines), Tally(), time.perf_counter()

    async def work() -> None:
        for line in left:  # shared: each worker takes the next line that nobody has
            await _answer(http, line, output, tally)
            progress(len(output.done) + tally.lines)

    workers = [asyncio.ensure_future(work()) for _ in range(max_concurrency)]
    try:
        for worker in asyncio.as_completed(workers):
            await worker
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    tally.seconds = time.perf_counter() - begin
    return tally


async def _answer(http: httpx.AsyncClient, line: Line, output: Output, tally: Tally) -> None:
    if line.error:
        output.write(refusal(line))
        tally.failed += 1
        await asyncio.sleep(0)
        return
    response = await http.post(line.url, content=line.body, headers={"content-type": "application/json"})
    if response.status_code == 503:  # not this line's fault, so the line has no result yet
        raise EngineDeadError(_message(response))
    output.write(result(line, response.status_code, response.headers.get("x-request-id", ""), response.content))
    if response.status_code != 200:
        tally.failed += 1
        return
    prompt_tokens, completion_tokens = tokens_of(response.content)
    tally.answered += 1
    tally.prompt_tokens += prompt_tokens
    tally.completion_tokens += completion_tokens


def _message(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(response.content)["error"]["message"])
    return "the engine answers no more"
