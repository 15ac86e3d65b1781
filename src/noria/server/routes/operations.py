"""GET /health, /ready, /metrics and /version: what those who run a server ask. None of them needs a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from noria import __version__
from noria.server.errors import json_response
from noria.server.metrics import CONTENT_TYPE
from noria.server.state import State


def operation_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """The server lives: it should not be killed."""
        return json_response({"status": "alive"})

    @router.get("/ready")
    async def ready(state: State) -> Response:
        """The server takes requests: 503 while the engine starts, is silent or is gone, and after SIGTERM."""
        health = state.engine.health()
        if state.draining:
            return json_response({"status": "the server is shutting down"}, 503)
        return json_response({"status": health.status}, 200 if health.ready else 503)

    @router.get("/metrics")
    async def metrics(state: State) -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    return router
