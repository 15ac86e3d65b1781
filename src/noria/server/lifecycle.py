"""The life of a server: listen, start the engine, serve, and leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from noria.config import EngineConfig
from noria.engine.client import EngineClient
from noria.errors import ConfigError, NoriaError
from noria.server.app import create_app
from noria.server.metrics import ServerMetrics
from noria.server.settings import ServerConfig
from noria.server.state import ServerState
from noria.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from noria.server.tracing import Tracing

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_FLUSH_S = 5  # seconds that answers get to reach their clients when the server ends
_POLL_S = 0.05


def serve(engine: EngineConfig, config: ServerConfig, name: str, note: Callable[[str], None]) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the engine.

    engine: its model is a path on this machine. name: what requests call the model unless config says otherwise.
    note: shows a line. Raises OSError when the address is taken, ConfigError or WeightsError when the engine cannot
    start, and EngineDeadError when it died and is not to be started again.
    """
    asyncio.run(_serve(engine, config, name, note))


async def _serve(engine_config: EngineConfig, config: ServerConfig, name: str, note: Callable[[str], None]) -> None:
    names = config.served_model_name or (name,)
    tracing = open_tracing(config.otlp_traces_endpoint, names[0])
    listener = _listen(config.host, config.port)
    tokenizer = load_tokenizer(Path(engine_config.tokenizer or engine_config.model), engine_config.chat_template)
    engine = EngineClient(
        engine_config,
        tokenizer,
        timeout_s=config.engine_timeout,
        max_queued_requests=config.max_queued_requests,
        restart=config.on_engine_death == "restart",
        progress=note,
    )
    state = ServerState(engine, config, names, engine_config.model, ServerMetrics(engine, names[0]), tracing)
    web = _Web(state)
    note(f"noria serves {', '.join(names)} at {_address(listener)}")
    async with _signals() as stop:
        serving = asyncio.ensure_future(web.serve(sockets=[listener]))
        running = asyncio.ensure_future(engine.run())
        asked = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({serving, running, asked}, return_when=asyncio.FIRST_COMPLETED)
            state.draining = True
            if asked.done() and not running.done():
                stop.clear()
                await _drain(state, stop, running, note)
        finally:
            state.draining = True
            await engine.close()  # who still waits is told so
            web.should_exit = True
            asked.cancel()
            await asyncio.gather(serving, running, asked, return_exceptions=True)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
    for task in (running, serving):
        if (error := task.exception()) is not None:
            raise error


def open_tracing(endpoint: str | None, model: str) -> Tracing | None:
    """Raises ConfigError when spans are wanted and the packages for them are not installed."""
    if endpoint is None:
        return None
    try:
        from noria.server.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs the package {error.name}; install noria with the extra otel: noria[otel]"
        ) from None
    return Tracing.to_collector(endpoint, model)


async def _drain(
    state: ServerState, stop: asyncio.Event, running: asyncio.Future[None], note: Callable[[str], None]
) -> None:
    """Waits until every request is answered: at most drain_timeout, or until a second signal or the engine's end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + state.config.drain_timeout
    note(f"shutting down: {state.active} requests run")
    while state.active and not stop.is_set() and not running.done() and loop.time() < deadline:
        await asyncio.sleep(_POLL_S)
    if state.active:
        note(f"shutting down: {state.active} requests are cut off")


class _Web(uvicorn.Server):
    """uvicorn, told when to end by this module alone."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(state),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """Yields an event that SIGTERM and SIGINT set."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _listen(host: str, port: int) -> socket.socket:
    """Before anything takes long, so that a taken address is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python repeats the address there
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise NoriaError(f"cannot listen at {host}:{port}: {reason}; choose another {option}") from None
    # Connections inherit it. asyncio would set it only on sockets that were made with a protocol number; without it a
    # small part of a stream waits until the client has acknowledged the one before, which takes up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
