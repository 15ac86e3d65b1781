"""The async front: the engine turns in a thread of its own, and any number of coroutines wait for their streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

from noria.config import EngineConfig, ResolvedConfig, SamplingParams
from noria.engine.admission import Prompt
from noria.engine.front import EngineFront
from noria.engine.llm import EngineStats
from noria.engine.outputs import RequestOutput
from noria.engine.startup import ProgressBar, start
from noria.errors import EngineDeadError
from noria.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """Where the outputs of a request go: a queue of the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | Exception]

    def put(self, item: RequestOutput | Exception) -> None:
        """Callable from any thread. A loop that is closed (RuntimeError) waits for nothing any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLM:
    """Like LLM, for asyncio. Create it anywhere; use it from any event loop."""

    def __init__(self, model: str | os.PathLike[str], *, progress: ProgressBar | None = None, **options: Any) -> None:
        """See LLM. Blocks until the engine is ready."""
        config = EngineConfig.from_options(model=model, **options)
        self._front = EngineFront(start(config, progress))
        self._ids = itertools.count()
        self._streams: dict[str, _Stream] = {}
        # For the engine's thread: what to do, and the stream that waits for it to be done.
        self._commands: deque[tuple[Callable[[], None], _Stream | None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="noria-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> ResolvedConfig:
        return self._front.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._front.engine.tokenizer

    @property
    def stats(self) -> EngineStats:
        return EngineStats.of(self._front.engine)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer part by part: each output holds what is new. Leaving the loop aborts the request.

        Raises RequestError when it cannot be served, EngineDeadError when the engine is gone.
        """
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        group = self._front.prepare(
            request_id,
            prompt,
            SamplingParams() if sampling_params is None else sampling_params,
            cache_salt=cache_salt,
            priority=priority,
        )
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            await self._front.grammars.validate_async(sampling_params.structured_outputs)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())

        def submit() -> None:
            try:
                self._front.submit(group)
            except Exception as error:  # whatever it is, it is this request's own
                stream.put(error)
            else:
                self._streams[request_id] = stream

        self._command(submit, stream)
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                with contextlib.suppress(EngineDeadError):
                    self._command(lambda: self._abort(request_id, stream))

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Ignores ids that are not running.

        Callable from any thread.
        """
        self._command(lambda: self._abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes before the next step. Callable from any thread."""
        self._command(self._front.engine.core.reset_prefix_cache)

    def close(self) -> None:
        """Ends the engine; streams that still wait get EngineDeadError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _command(self, command: Callable[[], None], stream: _Stream | None = None) -> None:
        with self._wake:
            if self._closing or self._death is not None:
                raise EngineDeadError(f"the engine has ended: {self._death or 'it was closed'}")
            self._commands.append((command, stream))
            self._wake.notify()

    def _abort(self, request_id: str, only: _Stream | None = None) -> None:
        """`only`: leave a later request of the same id alone. In the engine's thread."""
        stream = self._streams.get(request_id)
        if stream is None or (only is not None and stream is not only):
            return
        del self._streams[request_id]
        if (output := self._front.abort(request_id)) is not None:
            stream.put(output)

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._wait_for_work():
                for output in self._front.step():
                    stream = self._streams[output.request_id]
                    if output.finished:
                        del self._streams[output.request_id]
                    stream.put(output)
        except BaseException as error:
            _log.exception("the engine died")
            with self._wake:
                self._death = error
        finally:
            reason = f"the engine has ended: {self._death or 'it was closed'}"
            # From here on nobody adds a command; those that were added and not begun wait for an answer, too.
            for stream in (*self._streams.values(), *(stream for _, stream in self._commands if stream)):
                stream.put(EngineDeadError(reason))
            self._streams.clear()
            self._commands.clear()
            self._front.engine.core.close()

    def _wait_for_work(self) -> bool:
        """Carries out commands; sleeps while nothing runs. False when the engine is to end."""
        while True:
            with self._wake:
                while not (self._commands or self._closing or self._front.has_unfinished):
                    self._wake.wait()
                if self._closing:
                    return False
                count = len(self._commands)
            for _ in range(count):
                command, _stream = self._commands.popleft()
                command()
            if self._front.has_unfinished:
                return True
