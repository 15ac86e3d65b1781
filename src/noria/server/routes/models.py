"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from noria.server.errors import json_response
from noria.server.state import ServerState, State


def model_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models(state: State) -> Response:
        return json_response({"object": "list", "data": [_model(state, name) for name in state.model_names]})

    @router.get("/v1/models/{name:path}")
    async def model(state: State, name: str) -> Response:
        return json_response(_model(state, state.check_model(name)))

    return router


def _model(state: ServerState, name: str) -> dict[str, Any]:
    facts = state.engine.facts
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "noria",
        "root": state.model_path,
        "parent": None,
        "max_model_len": None if facts is None else facts.max_model_len,
    }
