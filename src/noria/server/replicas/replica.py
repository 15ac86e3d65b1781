"""One replica: an engine in a process of its own and the application in front of it, without a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from noria.config import EngineConfig, cache_home
from noria.engine.client import EngineClient
from noria.errors import EngineDeadError
from noria.server.app import create_app
from noria.server.lifecycle import open_tracing
from noria.server.metrics import ServerMetrics
from noria.server.replicas.relay import AnswerHead, RelayedRequest, answer
from noria.server.settings import ServerConfig
from noria.server.state import ServerState
from noria.text.tokenizer import load_tokenizer
from noria.weights.hub import resolve_model

_log = logging.getLogger(__name__)
_POLL_S = 0.05


class EngineReplica:
    """Made by `start`. Belongs to one event loop."""

    def __init__(self, state: ServerState, running: asyncio.Future[None]) -> None:
        self._state = state
        self._running = running
        self._app = create_app(state)

    @classmethod
    async def start(cls, engine_config: EngineConfig, config: ServerConfig, name: str) -> EngineReplica:
        """Returns when requests can be answered. Raises ConfigError or WeightsError when they never will.

        name: what requests call the model unless config says otherwise. Responses are not kept: the next request of the
        same client may come to another replica.
        """
        names = config.served_model_name or (name,)
        path = resolve_model(engine_config.model, engine_config.revision, cache_home())
        engine_config = dataclasses.replace(engine_config, model=str(path), revision=None)
        config = dataclasses.replace(config, response_store_bytes=0)
        tokenizer = load_tokenizer(Path(engine_config.tokenizer or path), engine_config.chat_template)
        engine = EngineClient(
            engine_config,
            tokenizer,
            timeout_s=config.engine_timeout,
            max_queued_requests=config.max_queued_requests,
            restart=config.on_engine_death == "restart",
        )
        tracing = open_tracing(config.otlp_traces_endpoint, names[0])
        state = ServerState(engine, config, names, str(path), ServerMetrics(engine, names[0]), tracing)
        running = asyncio.ensure_future(engine.run())
        while engine.facts is None:
            if running.done():
                running.result()
                raise EngineDeadError("the engine has ended before it was ready")
            await asyncio.sleep(_POLL_S)
        return cls(state, running)

    def answer(self, request: RelayedRequest) -> AsyncGenerator[AnswerHead | bytes]:
        return answer(self._app, request)

    def check(self) -> None:
        """Raises EngineDeadError when the engine has ended for good."""
        if self._running.done():
            raise EngineDeadError(f"the engine has ended: {self._running.exception()}")

    async def close(self) -> None:
        """Waits for what runs, drain_timeout at most, and ends the engine."""
        self._state.draining = True
        deadline = time.monotonic() + self._state.config.drain_timeout
        while self._state.active and not self._running.done() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await self._state.engine.close()
        await asyncio.gather(self._running, return_exceptions=True)
        if self._state.tracing is not None:
            await asyncio.to_thread(self._state.tracing.close)
