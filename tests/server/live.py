"""The service of fake_engine.py behind a real socket, in a thread: for clients that want an address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fake_engine import Service, service

from noria.text.tokenizer import Tokenizer


@dataclass
class Live:
    url: str
    service: Service


@contextlib.contextmanager
def live_service(tokenizer: Tokenizer, **options: Any) -> Iterator[Live]:
    """options: those of `service`."""
    begun: list[Service] = []
    is_up, is_over = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    async def work() -> None:
        async with service(tokenizer, **options) as running:
            config = uvicorn.Config(
                running.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            begun.append(running)
            is_up.set()
            while not is_over.is_set():
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", begun[0])
    finally:
        is_over.set()
        thread.join(10)
        listener.close()
