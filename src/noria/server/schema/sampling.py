"""The sampling parameters that completions and chats share, and their way into SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from noria.config import SamplingParams
from noria.errors import RequestError
from noria.server.schema.base import Body
from noria.server.schema.structured import StructuredBody

_MAX_DIGITS = 18  # of 64 bits


def _logit_bias(value: Any) -> Any:
    """JSON's keys are strings; token ids are integers."""
    if not isinstance(value, dict):
        return value
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(key: Any) -> int:
    if isinstance(key, int):  # a body that was checked before, as part of another
        return key
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS:
        return int(key)
    raise RequestError(f"logit_bias: {key!r:.80} is not a token id")


def _stop(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    raise RequestError("stop must be a string or a list of strings")


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _token_ids(value: Any, info: ValidationInfo) -> list[int]:
    """By hand: pydantic would list what is wrong with each of a million."""
    if is_token_ids(value):
        return value
    raise RequestError(f"{info.field_name} must be a list of token ids")


Stop = Annotated[
    Any,
    BeforeValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
TokenIds = Annotated[
    list[int], PlainValidator(_token_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]


class SamplingBody(StructuredBody):
    """Names are OpenAI's, beyond those vLLM's; None is the default of SamplingParams."""

    n: int | None = Field(None, description="answers to each prompt")
    temperature: float | None = Field(None, description="0 is greedy; 1 when left out")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: TokenIds | None = Field(None, description="tokens that are not sampled")
    min_tokens: int | None = None
    stop: Stop = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(
        None, description="log-probabilities of the prompt, and of so many of the likeliest"
    )
    _params: SamplingParams = PrivateAttr()  # set when the body is checked, so that a complaint is about the body

    @property
    def params(self) -> SamplingParams:
        return self._params

    def sampling_params(self, **others: Any) -> SamplingParams:
        """others: fields that have another name or default in this API, given on as they are. structured_outputs among
        them stands in for what the body says of it.

        Raises RequestError for a value out of range.
        """
        names = SamplingBody.model_fields.keys() - StructuredBody.model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        wanted = {name: value for name, value in given.items() if value is not None}
        structured: dict[str, Any] = {"structured_outputs": self.structure()}
        return SamplingParams(**wanted, **(structured | others))


class StreamOptions(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"include_obfuscation": (False,)})

    include_usage: bool | None = Field(None, description="send the token counts in a last chunk")
    continuous_usage_stats: bool | None = Field(None, description="and those so far in every chunk; with include_usage")


class AnsweredBody(SamplingBody):
    """What completions and chats say of how they are answered."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="changes nothing")
    priority: int | None = Field(None, description='for the scheduling policy "priority": the lower comes first')
    cache_salt: str | None = Field(None, description="only requests of one salt share cached prefixes")
    return_token_ids: bool | None = Field(None, description="answer with the token ids as well")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams; set stream, or leave it out")
        return self


# Parameters of the API, or of vLLM's, that this server does not have; base.Body.NEUTRAL explains the values.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "logits_processors": ([],),
        "service_tier": ("auto", "default"),
        "kv_transfer_params": (),
    }
)
