"""GET /: the chat page, plain files of server/ui/. They are the same for everybody and hold no secret, so none needs a
key; what the page asks of the API does."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

_TYPES = (
    (".html", "text/html; charset=utf-8"),
    (".css", "text/css; charset=utf-8"),
    (".js", "text/javascript; charset=utf-8"),
    (".svg", "image/svg+xml"),
)
PAGE_FILES = (
    "index.html",
    "style.css",
    "message.css",
    "icon.svg",
    "app.js",
    "api.js",
    "conversation.js",
    "dialogs.js",
    "dom.js",
    "gauges.js",
    "inline.js",
    "markdown.js",
    "message.js",
    "meter.js",
    "options.js",
    "theme.js",
)
PAGE_PATHS = frozenset(("/", *(f"/ui/{name}" for name in PAGE_FILES)))
# Nothing is loaded from elsewhere, sent elsewhere or run from the page's own text, whatever a model answers.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    folder = resources.files("noria.server") / "ui"
    for name in PAGE_FILES:
        answer = _answer((folder / name).read_bytes(), _type_of(name))
        router.add_api_route(f"/ui/{name}", answer, methods=["GET", "HEAD"])
        if name == "index.html":
            router.add_api_route("/", answer, methods=["GET", "HEAD"])
    return router


def _answer(content: bytes, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers with one file: browsers ask each time and get it when it has changed."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Cache-Control": "no-cache",
        "ETag": tag,
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def answer(request: Request) -> Response:
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=content_type)

    return answer


def _type_of(name: str) -> str:
    return next(content_type for suffix, content_type in _TYPES if name.endswith(suffix))
