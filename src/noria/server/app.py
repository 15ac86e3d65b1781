"""The application: routes, and what stands before and behind all of them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from noria import __version__
from noria.errors import NoriaError
from noria.server.auth import OPEN_PATHS, RequireKey
from noria.server.errors import ApiError, api_error
from noria.server.openapi import describe
from noria.server.requests import RequestScope
from noria.server.routes.chat import chat_routes
from noria.server.routes.completions import completion_routes
from noria.server.routes.models import model_routes
from noria.server.routes.operations import operation_routes
from noria.server.routes.page import PAGE_PATHS, page_routes
from noria.server.routes.responses import response_routes
from noria.server.routes.stored_responses import stored_response_routes
from noria.server.routes.tokenize import tokenize_routes
from noria.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    open_paths = OPEN_PATHS | PAGE_PATHS if state.config.chat_page else OPEN_PATHS
    app = FastAPI(
        title="noria",
        version=__version__,
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestScope, state=state),
            Middleware(RequireKey, keys=state.config.api_key, open_paths=open_paths),
        ],
        exception_handlers={
            ApiError: _told,
            NoriaError: _told,
            HTTPException: _http_error,
            RequestValidationError: _invalid,
            ClientDisconnect: _gone,
        },
    )
    app.state.noria = state
    app.openapi = lambda: describe(app)
    groups = (
        operation_routes,
        model_routes,
        completion_routes,
        chat_routes,
        response_routes,
        stored_response_routes,
        tokenize_routes,
    )
    for routes in groups:
        app.include_router(routes())
    if state.config.chat_page:
        app.include_router(page_routes())
    return app


async def _told(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    messages = {404: f"there is no {what} here", 405: f"{what}: the method is not allowed"}
    message = messages.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def _invalid(request: Request, error: Exception) -> Response:
    return ApiError(400, f"the request is not valid: {error}").response()


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; 499 is what nginx calls a client that left."""
    return Response(status_code=499)
