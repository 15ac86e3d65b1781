"""The OpenAPI document's part that FastAPI cannot see, because bodies are read and checked by this server itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from noria import __version__
from noria.server.schema.chat import ChatBody
from noria.server.schema.completion import CompletionBody
from noria.server.schema.responses import ResponseBody
from noria.server.schema.tokenize import DetokenizeBody, TokenizeBody

_REFERENCE = "#/components/schemas/{model}"
_BODIES = (CompletionBody, ChatBody, ResponseBody, TokenizeBody, DetokenizeBody)


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """For a route's openapi_extra."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="noria", version=__version__, routes=app.routes)
    _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return document
