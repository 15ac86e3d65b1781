"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from noria.errors import RequestError
from noria.server.schema.sampling import UNSUPPORTED, AnsweredBody, is_token_ids

Prompts = list[str | list[int]]
_TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
_IDS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    }
)


def _prompts(value: Any) -> Prompts:
    """One prompt or a list of them, always as a list. By hand: a union would list every way in which each of a million
    ids is not a string."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt must be a string, token ids, or a list of one of these that is not empty")
    if is_token_ids(value):
        return [value]
    if not all(isinstance(each, str) or is_token_ids(each) for each in value):
        raise RequestError("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    return value


class CompletionBody(AnsweredBody):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {**UNSUPPORTED, "suffix": ("",), "add_special_tokens": (True,)}
    )

    model: str | None = None
    prompt: Annotated[Any, PlainValidator(_prompts), WithJsonSchema(dict(_PROMPT_SCHEMA))]
    max_tokens: int | None = Field(
        None,
        description="16 when left out; 0 with echo: the prompt alone",
        json_schema_extra={"minimum": 0},
    )
    logprobs: int | None = Field(None, description="log-probabilities of each token, and of so many of the likeliest")
    echo: bool | None = Field(None, description="begin every answer with its prompt")

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs does not work with stream; echo with logprobs does")
        if self.echo and self.logprobs is not None:
            if self.prompt_logprobs not in (None, self.logprobs):
                raise RequestError("prompt_logprobs must be equal to logprobs when both are shown with echo")
            self.prompt_logprobs = self.logprobs
        limit = {} if self.max_tokens is None else {"max_tokens": 1 if self.only_echoes else self.max_tokens}
        self._params = self.sampling_params(logprobs=self.logprobs, **limit)
        return self

    @property
    def only_echoes(self) -> bool:
        """The prompt is to be shown, and perhaps scored. The engine generates one token at least, which is dropped."""
        return bool(self.echo) and self.max_tokens == 0
