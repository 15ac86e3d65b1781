"""The async front of an engine that runs in a process of its own: AsyncLLM's interface, and a watch over the process.

Prompts are tokenized and checked on this side, so a bad request costs the engine nothing. Nothing here imports jax.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from noria import errors
from noria.config import EngineConfig, SamplingParams
from noria.engine.admission import Admission, Prompt
from noria.engine.child import EngineProcess
from noria.engine.messages import (
    Abort,
    Ended,
    FromEngine,
    Heartbeat,
    Part,
    Parts,
    Progress,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stats,
    Submit,
    pack_params,
)
from noria.engine.outputs import RequestMetrics, RequestOutput
from noria.errors import (
    ConfigError,
    EngineDeadError,
    NoriaError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from noria.grammar.compiler import GrammarCompiler
from noria.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 0.1  # what a dead process said last may be on its way still
_GRACE_S = 10.0  # that a process gets to end by itself
_START_GRACE_S = 1.0  # the same while it starts, when it reads no messages
_INLINE_PROMPT = 4096  # characters or ids; a longer prompt is prepared in a thread, while others are served


@dataclass(frozen=True, slots=True)
class Health:
    ready: bool
    status: str  # "ready", or what is in the way


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that was tokenized and checked."""

    text: str | None  # None for a prompt of ids
    token_ids: list[int]


@dataclass(slots=True)
class _Stream:
    """One request on its way."""

    request_id: str  # the caller's
    prompt: PreparedPrompt
    num_sequences: int
    metrics: RequestMetrics
    queue: asyncio.Queue[Part | NoriaError] = field(default_factory=asyncio.Queue)

    def output(self, part: Part) -> RequestOutput:
        metrics, now = self.metrics, time.perf_counter()
        if metrics.first_token_time is None and part.queue_s is not None:
            metrics.first_token_time = now
            metrics.scheduled_time = min(now, metrics.arrival_time + part.queue_s)
        if part.finished:
            metrics.finished_time = now
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=part.outputs,
            finished=part.finished,
            num_cached_tokens=part.num_cached_tokens,
            metrics=metrics,
            prompt_logprobs=part.prompt_logprobs,
        )


class EngineClient:
    """Belongs to one event loop. `run` must be running for anything else to work."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        timeout_s: float = 60.0,
        max_queued_requests: int = 1024,
        restart: bool = True,
        progress: Callable[[str], None] = _log.info,
    ) -> None:
        """tokenizer: that of `config`. timeout_s: of silence, after which the engine is not ready. max_queued_requests:
        sequences that may wait beyond those that run. restart: start an engine that died again. progress: told in words
        how far a start is.
        """
        if timeout_s <= 0:
            raise ConfigError(f"engine_timeout must be positive, not {timeout_s}")
        self.tokenizer = tokenizer
        self._config = config
        self._timeout_s = timeout_s
        self._max_queued = max_queued_requests
        self._restart = restart
        self._grammars = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)  # to refuse bad ones
        self._progress = progress
        self._serial = itertools.count()
        self._streams: dict[str, _Stream] = {}  # by an id that is never used again
        self._num_sequences = 0
        self._process: EngineProcess | None = None
        self._facts: Ready | None = None  # of the engine that serves now
        self._admission: Admission | None = None
        self._stats: Stats | None = None
        self._heard = 0.0  # when the engine last said something, in time.monotonic()
        self._close_asked = asyncio.Event()
        self._closed = asyncio.Event()
        self._running = False

    # ---------------------------------------------------------------------------------------------- what is known

    @property
    def facts(self) -> Ready | None:
        """What the engine said when it was ready; None while there is none."""
        return self._facts

    @property
    def stats(self) -> Stats | None:
        """As of the last heartbeat; None before the first."""
        return self._stats

    @property
    def num_unfinished(self) -> int:
        """Requests."""
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._process.pid if self._process else None

    def health(self) -> Health:
        if self._close_asked.is_set():
            return Health(False, "closed")
        if self._facts is None:
            return Health(False, "the engine is starting")
        silence = time.monotonic() - self._heard
        if silence > self._timeout_s:
            return Health(False, f"the engine has not answered for {silence:.1f} s")
        return Health(True, "ready")

    # ------------------------------------------------------------------------------------------------ the requests

    async def prepare(self, prompt: Prompt, sampling_params: SamplingParams) -> PreparedPrompt:
        """Tokenizes and checks a prompt with its parameters, for `generate`.

        Raises RequestError when it cannot be served, UnavailableError while no engine is ready.
        """
        self._check_ready()
        admission = self._admission
        assert admission is not None
        if sampling_params.structured_outputs is not None:
            await self._grammars.validate_async(sampling_params.structured_outputs)
        if isinstance(prompt, (str, list)) and len(prompt) > _INLINE_PROMPT:
            return await asyncio.to_thread(_prepare, admission, prompt, sampling_params)
        return _prepare(admission, prompt, sampling_params)

    def check_room(self, num_sequences: int) -> None:
        """Raises QueueFullError when so many more cannot wait, RequestError when they never could."""
        self._check_ready()
        assert self._facts is not None
        limit = self._facts.max_num_seqs + self._max_queued
        if num_sequences > limit:
            raise RequestError(f"a request for {num_sequences} sequences exceeds the {limit} that may run and wait")
        if self._num_sequences + num_sequences > limit:
            raise QueueFullError(f"{self._num_sequences} sequences run or wait already; try again a little later")

    async def generate(
        self,
        prompt: Prompt | PreparedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the answer part by part: each output holds what is new. Leaving the loop aborts the request.

        timeout_s: from now to the end of the answer. Raises RequestError when it cannot be served, UnavailableError
        when not now, RequestTimeoutError, and EngineDeadError when the engine ends meanwhile.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(prompt, PreparedPrompt):
            prompt = await self.prepare(prompt, params)
        self.check_room(params.n)
        process = self._process
        assert process is not None
        serial = str(next(self._serial))
        core_id = serial if request_id is None else f"{request_id}.{serial}"
        stream = _Stream(request_id or core_id, prompt, params.n, RequestMetrics(time.perf_counter()))
        self._streams[core_id] = stream
        self._num_sequences += stream.num_sequences
        process.send(Submit(core_id, prompt.token_ids, pack_params(params), cache_salt, priority))
        timer = self._timer(stream, timeout_s)
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, NoriaError):
                    finished = not isinstance(item, RequestTimeoutError)
                    raise item
                finished = item.finished
                yield stream.output(item)
        finally:
            del self._streams[core_id]
            self._num_sequences -= stream.num_sequences
            if timer is not None:
                timer.cancel()
            if not finished and process is self._process:
                process.send(Abort(core_id))

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Ignores ids that do not run."""
        for core_id, stream in self._streams.items():
            if stream.request_id == request_id and self._process is not None:
                self._process.send(Abort(core_id))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes before the next step."""
        if self._process is not None:
            self._process.send(ResetPrefixCache())

    def _check_ready(self) -> None:
        if not (health := self.health()).ready:
            raise UnavailableError(f"no request can be served now: {health.status}")

    def _timer(self, stream: _Stream, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = RequestTimeoutError(f"the request was aborted: it was not answered within {timeout_s:g} s")
        return asyncio.get_running_loop().call_later(timeout_s, stream.queue.put_nowait, error)

    # ------------------------------------------------------------------------------------------------- the process

    async def run(self) -> None:
        """Starts the engine and looks after it until `close`. May be called once.

        Raises what was wrong with a start (ConfigError, WeightsError), and EngineDeadError when a running engine died
        and is not to be started again.
        """
        self._running = True
        warm_up = asyncio.ensure_future(asyncio.to_thread(self._grammars.warm_up))  # while the engine starts
        try:
            while not self._close_asked.is_set():
                error, was_ready = await self._run_once()
                if self._close_asked.is_set():
                    return
                if not (self._restart and was_ready):
                    raise error
                _log.error("%s; starting it again", error)
        finally:
            self._close_asked.set()
            await asyncio.gather(warm_up, return_exceptions=True)
            self._grammars.close()
            self._closed.set()

    async def close(self) -> None:
        """Ends the engine; streams that still wait get EngineDeadError."""
        self._close_asked.set()
        if self._running:
            await self._closed.wait()

    async def _run_once(self) -> tuple[NoriaError, bool]:
        """From the start of a process to its end. Returns why it ended, and whether it had been ready."""
        process = await EngineProcess.spawn(Start(options_of(self._config), min(0.5, self._timeout_s / 4)))
        self._process = process
        error: NoriaError = EngineDeadError("the engine has ended: it was closed")
        try:
            error = await self._attend(process)
        finally:
            was_ready = self._facts is not None
            self._process = self._facts = self._admission = self._stats = None
            for stream in self._streams.values():
                stream.queue.put_nowait(error)
            await process.end(_GRACE_S if was_ready else _START_GRACE_S)
        return error, was_ready

    async def _attend(self, process: EngineProcess) -> NoriaError:
        """Takes what the process says until it ends or is to be closed; returns why."""
        reader = asyncio.ensure_future(self._read(process))
        ended = asyncio.ensure_future(process.wait())
        closing = asyncio.ensure_future(self._close_asked.wait())
        try:
            await asyncio.wait({reader, ended, closing}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not reader.done():
                await asyncio.wait({reader}, timeout=_LAST_WORDS_S)
            if reader.done():
                return reader.result()
            if ended.done():
                return EngineDeadError(f"the engine has ended: its process {ended.result()}")
            return EngineDeadError("the engine has ended: it was closed")
        finally:
            for task in (reader, ended, closing):
                task.cancel()
            await asyncio.gather(reader, ended, closing, return_exceptions=True)

    async def _read(self, process: EngineProcess) -> NoriaError:
        while True:
            try:
                message = await process.receive()
            except msgspec.MsgspecError as error:
                return EngineDeadError(f"the engine has ended: what it says makes no sense ({error})")
            self._heard = time.monotonic()
            if isinstance(message, Ended):
                return errors.named(message.kind, message.reason)
            self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Parts(parts):
                for part in parts:
                    if (stream := self._streams.get(part.request_id)) is not None:
                        stream.queue.put_nowait(part)
            case Heartbeat(stats):
                self._stats = stats
            case Refused(request_id, reason):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.queue.put_nowait(RequestError(reason))
            case Progress(stage):
                self._progress(stage)
            case Ready():
                self._admission = Admission(
                    self.tokenizer,
                    vocab_size=message.vocab_size,
                    max_model_len=message.max_model_len,
                    eos_token_ids=message.eos_token_ids,
                    seed=None,
                    max_logprobs=message.max_logprobs,
                )
                self._facts = message
                self._progress(message.report)


def _prepare(admission: Admission, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
    text, token_ids = admission.tokenize(prompt)
    one = params if params.n == 1 else dataclasses.replace(params, n=1)
    admission.requests("check", token_ids, one)  # for its refusals; the engine makes its own
    return PreparedPrompt(text, token_ids)


def options_of(config: EngineConfig) -> dict[str, Any]:
    """The fields of a configuration by name, as a Start message carries them."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
