"""Server-sent events, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.server.errors import api_error

DONE = b"data: [DONE]\n\n"
_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))
T = TypeVar("T")


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """An event whose type is told twice, as /v1/responses does."""
    return b"event: " + content["type"].encode() + b"\n" + event(content)


class EventStream(Response):
    """Sends events as they come. The events end when the client leaves: their generator is closed at once.

    The status is sent before the first event is there, so an error becomes a last event.
    """

    def __init__(self, events: AsyncGenerator[bytes], *, last: bytes = DONE) -> None:
        """last: what is sent when there are no more."""
        super().__init__(status_code=200)
        self._events = events
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [*_HEADERS, (b"x-accel-buffering", b"no")]}
        )
        with contextlib.suppress(ClientDisconnect):
            await _while_connected(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(_until_done(self._events, self._last)) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _until_done(events: AsyncGenerator[bytes], last: bytes) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        try:
            async for data in events:
                yield data
        except Exception as error:
            yield event(api_error(error).body)
    if last:
        yield last


async def answer(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client leaves. Raises ClientDisconnect then."""
    return await _while_connected(work, request.receive)


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
