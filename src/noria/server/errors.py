"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response

from noria.errors import (
    EngineDeadError,
    NoriaError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)

_log = logging.getLogger(__name__)
_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
)
_RETRY_AFTER_S = "1"


class ApiError(Exception):
    """An answer that is an error. Everything a client may get is made one of these."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param  # the field of the body that is wrong
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", _RETRY_AFTER_S)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def api_error(error: BaseException) -> ApiError:
    """What a client is told about any exception: no more of an unexpected one than that there was one."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error))
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case UnavailableError():
            return ApiError(503, str(error), code="not_ready")
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case RequestTimeoutError():
            return ApiError(504, str(error), code="timeout")
        case NoriaError():
            return ApiError(500, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why", code="internal_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Strict JSON: no NaN, no Infinity (msgspec writes null for them)."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
