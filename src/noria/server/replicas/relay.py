"""A request answered by an application that is elsewhere: it crosses whole, and its answer comes back in parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str | None = None  # address


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first part of an answer; those that follow are bytes of its body."""

    status: int
    headers: Headers


async def answer(app: ASGIApp, request: RelayedRequest) -> AsyncGenerator[AnswerHead | bytes]:
    """Leaving the loop is what a client does who closes the connection. Raises what the application raises."""
    parts: asyncio.Queue[AnswerHead | bytes | None] = asyncio.Queue()
    given, left = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            parts.put_nowait(AnswerHead(message["status"], [*message.get("headers", ())]))
        elif message["type"] == "http.response.body" and message.get("body"):
            parts.put_nowait(bytes(message["body"]))

    task = asyncio.ensure_future(app(_scope(request), receive, send))
    task.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
        task.result()
    finally:
        left.set()
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _scope(request: RelayedRequest) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": None if request.client is None else (request.client, 0),
        "server": None,
        "state": {},
    }
