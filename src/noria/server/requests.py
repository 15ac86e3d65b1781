"""What surrounds every HTTP request: its id, the count of those that run, and its body, limited and decoded."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.server.errors import ApiError, api_error
from noria.server.schema.base import describe_invalid
from noria.server.state import ServerState

_access_log = logging.getLogger("noria.access")
_ID_HEADER = b"x-request-id"
_MAX_ID = 256
_PATIENCE = 4  # times the limit
_INLINE_BODY = 1 << 16  # bytes; a longer body is decoded in a thread, while others are served
Model = TypeVar("Model", bound=BaseModel)


class RequestScope:
    """ASGI middleware: gives every request an id (the client's x-request-id, or a new one) and sends it back, counts
    those that run, logs those that ran, and turns what nobody caught into an error that a client understands."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _ID_HEADER), None)
        request_id = uuid.uuid4().hex.encode() if given is None else given
        begin, status = time.perf_counter(), 0  # 0: no answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_ID_HEADER, request_id)]
            await send(message)

        self._state.active += 1
        try:
            if not _is_id(request_id):
                request_id = uuid.uuid4().hex.encode()
                raise ApiError(400, f"x-request-id must be 1 to {_MAX_ID} printable ASCII characters")
            scope["request_id"] = request_id.decode()
            with self._trace(scope):
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # in the middle of its body
        except Exception as error:
            if status:
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._state.active -= 1
            if self._state.config.access_log:
                self._log(scope, request_id, status, time.perf_counter() - begin)

    def _trace(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        tracing = self._state.tracing
        return contextlib.nullcontext() if tracing is None else tracing.incoming(scope["headers"])

    def _log(self, scope: Scope, request_id: bytes, status: int, seconds: float) -> None:
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id.decode(),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "client": scope["client"][0] if scope.get("client") else None,
        }
        _access_log.info("%s", msgspec.json.encode(line).decode())


def _is_id(value: bytes) -> bool:
    return 0 < len(value) <= _MAX_ID and all(32 < byte < 127 for byte in value)


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError 413 for more than `limit` bytes.

    What is not much longer is read to its end and dropped: many a client reads no answer before it has sent everything.
    """
    patience = _PATIENCE * limit
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    if size <= patience:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                body += chunk
            elif size > patience:
                break
    if size > limit:
        headers = {"Connection": "close"} if size > patience else None  # what is not read would come before the next
        raise ApiError(413, f"the body exceeds max_body_bytes ({limit})", code="body_too_large", headers=headers)
    return bytes(body)


def body_of(model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
    """A dependency of a route: the body as `model`. Raises ApiError for whatever is wrong with it."""

    async def read(request: Request) -> Model:
        state: ServerState = request.app.state.noria
        body = await read_body(request, state.config.max_body_bytes)
        if len(body) > _INLINE_BODY:
            return await asyncio.to_thread(decode, model, body)
        return decode(model, body)

    return read


def decode(model: type[Model], body: bytes) -> Model:
    """Strict JSON (no NaN, no Infinity) of exactly the declared fields and types. Raises ApiError 400."""
    try:
        content: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        message, param = describe_invalid(error, model)
        raise ApiError(400, message, param=param) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
