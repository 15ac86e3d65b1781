"""Who may ask: one of the keys as a bearer token, for everything but what a machine's supervisor asks."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from noria.server.errors import ApiError

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics"))


class RequireKey:
    """ASGI middleware: answers 401 itself."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is missing; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                given = given.strip() if scheme.lower() == b"bearer" else b""
        # All are compared, each in constant time, so that the time says nothing about the keys.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0
