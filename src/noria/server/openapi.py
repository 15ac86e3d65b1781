"""The OpenAPI document's part that FastAPI cannot see, because bodies are read and checked by this server itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
# What SamplingParams checks, by the names of fields.
_RANGES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{name: {"minimum": 1} for name in ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")},
        **{name: {"minimum": 0} for name in ("logprobs", "top_logprobs", "prompt_logprobs", "min_tokens")},
        **{name: {"minimum": -2, "maximum": 2} for name in ("presence_penalty", "frequency_penalty")},
        "temperature": {"minimum": 0},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
        "cache_salt": {"minLength": 1},
        "allowed_token_ids": {"minItems": 1},
        "logit_bias": {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    }
)


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """For a route's openapi_extra."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="noria", version=__version__, routes=app.routes)
    _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
    for definition in definitions["$defs"].values():
        for name, schema in definition.get("properties", {}).items():
            schema.update({**_RANGES.get(name, {}), **schema})  # what a body says of its own field holds
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return document
