"""A server in this process whose engine computes nothing: everything is real but the socket and the device."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from noria.cache.paged_cache import CacheStats
from noria.config import EngineConfig, ModelLimits, SamplingParams
from noria.engine.client import EngineClient
from noria.engine.messages import Codec, FromEngine, Ready, ToEngine
from noria.engine.process import EngineLoop
from noria.engine.request import FinishReason, Request
from noria.engine.startup import Engine
from noria.errors import EngineDeadError
from noria.observe.step_clock import StepTimes
from noria.scheduler.scheduler import SchedulerStats
from noria.server.app import create_app
from noria.server.metrics import ServerMetrics
from noria.server.settings import ServerConfig
from noria.server.state import ServerState
from noria.spec.stats import SpeculationStats
from noria.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 128
VOCAB_SIZE = 192  # of the tokenizer
NUM_EMBEDDINGS = 208  # the last ones are padding, which nobody may ask for


def figures(token: int, count: int) -> tuple[tuple[int, float, int], ...]:
    """As Request.logprobs: the likeliest tokens are always 10, 11, 12, ..."""
    top = tuple((10 + index, -1.0 - index, 1 + index) for index in range(count))
    mine = (token, -1.0 - (token - 10), 1 + token - 10) if 10 <= token < 10 + count else (token, -50.0, 99)
    return (mine, *top)


class ParrotCore:
    """In the place of EngineCore: every sequence gets its prompt's tokens again and again, the i-th of n from the i-th
    on. `script` may say other tokens by prompt."""

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.num_steps = 0
        self.aborted_at: list[int] = []  # steps
        self.script: dict[tuple[int, ...], list[int]] = {}
        self.say: list[int] | None = None  # whatever the prompt is
        self.burst = 1  # tokens of a step
        self.max_model_len = MAX_MODEL_LEN
        self.asked: list[SamplingParams] = []
        self.frozen = False
        self.failure: Exception | None = None
        self.runner = SimpleNamespace(compiles_after_warmup=0)
        self.times = StepTimes(1.0, 0.25)
        self.scheduler = self
        self.speculation = SimpleNamespace(stats=SpeculationStats(4, 9, 6, (4, 2), (4, 3)))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    @property
    def stats(self) -> SchedulerStats:
        used = len(self.running)
        return SchedulerStats(used, 0, 0, CacheStats(100, used, 100 - used, 0, 40, 10))

    def add(self, request: Request) -> None:
        self.asked.append(request.sampling_params)
        room = self.max_model_len - request.num_prompt_tokens
        limit = request.sampling_params.max_tokens
        request.max_num_tokens = request.num_prompt_tokens + (room if limit is None else min(room, limit))
        request.scheduled_time = time.perf_counter()
        request.num_cached_tokens = (request.num_prompt_tokens - 1) // 16 * 16
        self.running.append(request)

    def abort(self, request_ids: list[str]) -> list[Request]:
        ended = [request for request in self.running if request.request_id in request_ids]
        for request in ended:
            if not request.is_finished:
                request.finish(FinishReason.ABORT)
                self.aborted_at.append(self.num_steps)
        self.running = [request for request in self.running if request not in ended]
        return ended

    def step(self) -> list[tuple[Request, list[int]]]:
        if self.failure is not None:
            raise self.failure
        self.num_steps += 1
        news = []
        for request in self.running:
            tokens: list[int] = []
            while len(tokens) < self.burst and not request.is_finished:
                tokens.append(self._next(request))
            news.append((request, tokens))
        self.running = [request for request in self.running if not request.is_finished]
        return news

    def _next(self, request: Request) -> int:
        say = self.say or self.script.get(tuple(request.prompt_token_ids), request.prompt_token_ids)
        offset = 0 if self.say else int(request.request_id.rsplit(":", 1)[1])
        token = say[(offset + request.num_output_tokens) % len(say)]
        if request.sampling_params.logprobs is not None:
            request.logprobs.append(figures(token, request.sampling_params.logprobs))
        wanted = request.sampling_params.prompt_logprobs
        if wanted is not None:
            request.prompt_logprobs = [figures(each, wanted) for each in request.prompt_token_ids[1:]]
        request.append(token)
        return token

    def close(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass


class FakeProcess:
    """In the place of EngineProcess, and its engine's link: what is sent goes through the codec and a queue."""

    pid = 1

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._codec = Codec()
        self._inbox: deque[bytes] = deque()

    def send(self, message: Any) -> None:
        if isinstance(message, FromEngine):
            self._client._heard = time.monotonic()
            self._client._take(self._codec.decode_from_engine(self._codec.encode(message)))
        else:
            self._inbox.append(self._codec.encode(message))

    def receive(self, wait_s: float) -> Iterator[ToEngine]:
        while self._inbox:
            yield self._codec.decode_to_engine(self._inbox.popleft())


@dataclass
class Service:
    state: ServerState
    core: ParrotCore
    engine: EngineClient
    http: httpx.AsyncClient
    app: Any
    failures: list[Exception] = field(default_factory=list)

    async def until_idle(self) -> None:
        while self.core.running or self.engine.num_unfinished or self.state.active:
            await asyncio.sleep(0.001)

    async def steps(self, count: int) -> None:
        goal = self.core.num_steps + count
        while self.core.num_steps < goal:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def service(tokenizer: Tokenizer, *, step_s: float = 0.0, **options: Any) -> AsyncIterator[Service]:
    """options: of ServerConfig, and `scheduling_policy` and `max_model_len`."""
    max_model_len = options.pop("max_model_len", MAX_MODEL_LEN)
    policy = options.pop("scheduling_policy", "fcfs")
    config = ServerConfig(**options)
    core = ParrotCore()
    core.max_model_len = max_model_len
    engine_config = EngineConfig(model="parrot", scheduling_policy=policy, max_model_len=max_model_len)
    resolved = engine_config.resolve(ModelLimits(max_model_len, NUM_EMBEDDINGS), "cpu")
    parts: Any = (resolved, core, tokenizer, NUM_EMBEDDINGS, (2,), SimpleNamespace())
    client = EngineClient(
        engine_config,
        tokenizer,
        timeout_s=config.engine_timeout,
        max_queued_requests=config.max_queued_requests,
    )
    process: Any = FakeProcess(client)
    client._process = process
    loop = EngineLoop(Engine(*parts), process, 0.01)
    state = ServerState(client, config, ("parrot", "polly"), "parrot", ServerMetrics(client, "parrot"))
    app = create_app(state)
    ready = Ready(max_model_len, 4, 20, NUM_EMBEDDINGS, (2,), policy, "ready")

    async def turn() -> None:
        process.send(ready)
        while True:
            if not core.frozen:
                try:
                    loop.turn()
                except Exception as error:
                    client._facts = None
                    for stream in client._streams.values():
                        stream.queue.put_nowait(EngineDeadError(f"the engine has ended: {error}"))
                    return
            await asyncio.sleep(step_s)

    turning = asyncio.ensure_future(turn())
    await asyncio.sleep(0)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://noria", timeout=20) as http:
        try:
            yield Service(state, core, client, http, app)
        finally:
            turning.cancel()
            await asyncio.gather(turning, return_exceptions=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Whatever hangs is an error, not a test run that never ends."""
    return asyncio.run(asyncio.wait_for(work, 30))


def ask(tokenizer: Tokenizer, method: str, path: str, options: dict[str, Any] | None = None, **request: Any) -> Any:
    """One request to a service of its own."""

    async def work() -> httpx.Response:
        async with service(tokenizer, **(options or {})) as running:
            return await running.http.request(method, path, **request)

    return run(work())


class Visitor:
    """A client without httpx: it can leave at any moment."""

    def __init__(self, app: Any, path: str, body: bytes) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("here", 1),
            "server": ("there", 2),
        }
        self._messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        await asyncio.sleep(0)
