"""The body of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from noria.errors import RequestError
from noria.server.schema.base import Body, FieldError
from noria.server.schema.items import Input
from noria.server.schema.sampling import UNSUPPORTED, SamplingBody

MAX_METADATA = 16  # pairs
_MAX_KEY, _MAX_VALUE = 64, 512  # characters
_LOGPROBS = "message.output_text.logprobs"
# Reasoning items always carry their content in clear and can be sent back as they are: nothing is missing without.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")


_NAMES_IN_CHATS: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": f"include with {_LOGPROBS}",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }
)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        is_schema = self.type == "json_schema"
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if is_schema and value is None:
                raise RequestError(f"{name} is missing: a format of type json_schema needs it")
        given = (
            ("name", self.name),
            ("schema", self.schema_),
            ("description", self.description),
            ("strict", self.strict),
        )
        for name, value in given:
            if not is_schema and value is not None:
                raise RequestError(f"{name} is for a format of type json_schema; leave it out")
        return self

    def echo(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)

    def response_format(self) -> dict[str, Any] | None:
        """As chats have it; None for text of any kind."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {k: v for k, v in self.echo().items() if k != "type"}}


class TextOptions(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ReasoningOptions(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "effort": (),
            "summary": (),
            "generate_summary": (),
            "context": ("auto", "all_turns"),
            "mode": ("standard",),
        }
    )


class StreamChoices(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"include_obfuscation": (False,)})


class FunctionTool(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,), "output_schema": ()}
    )

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, content: Any) -> Any:
        kind = content.get("type") if isinstance(content, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise RequestError(f"a tool of type {kind} is not supported; this server knows tools of type function")
        return content

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}

    def echo(self) -> dict[str, Any]:
        return self.model_dump()


def _choice(value: Any) -> Any:
    """none, auto, required, or the name of a function as ("function", name)."""
    if value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "function":
        told = kind if isinstance(kind, str) else value
        raise RequestError(
            f"tool_choice {told!r:.80} is not supported; it must be none, auto, required, or "
            '{"type": "function", "name": ...}'
        )
    if value.keys() != {"type", "name"} or not isinstance(value["name"], str):
        raise RequestError("a tool_choice of type function must have a name, which is a string, and nothing else")
    return value


ToolChoice = Annotated[
    Any,
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
                    "required": ["type", "name"],
                },
            ]
        }
    ),
]


class ResponseBody(SamplingBody):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **UNSUPPORTED,
            "n": (1,),
            "prompt_logprobs": (),
            "access_programs": (),
            "background_options": (),
            "context_management": ([],),
            "conversation": (),
            "image": (),
            "max_tool_calls": (),
            "moderation": (),
            "prompt": (),
            "prompt_cache_options": (),
            "prompt_cache_retention": ("in_memory",),
        }
    )

    model: str | None = None
    input: Input
    instructions: str | None = Field(
        None, description="a system message before everything else; of this response alone"
    )
    max_output_tokens: int | None = Field(None, description="as many as max_model_len leaves when left out")
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = Field(None, description=f"{_LOGPROBS}: log-probabilities with the text")
    top_logprobs: int | None = Field(None, description="log-probabilities of so many of the likeliest, too")
    stream: bool | None = None
    stream_options: StreamChoices | None = None
    background: bool | None = Field(
        None, description="answer at once, and go on when the client leaves; ask for it later"
    )
    store: bool | None = Field(None, description="keep the response, so that it can be asked for by its id; true")
    previous_response_id: str | None = Field(None, description="go on after this response's conversation")
    truncation: Literal["disabled"] | None = Field(None, description="an input that is too long is an error")
    metadata: dict[str, str] | None = Field(None, description="comes back with the response")
    user: str | None = Field(None, description="changes nothing; comes back with the response")
    safety_identifier: str | None = Field(None, description="changes nothing; comes back with the response")
    prompt_cache_key: str | None = Field(None, description="changes nothing: every prefix is looked up")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the template")
    priority: int | None = Field(None, description='for the scheduling policy "priority": the lower comes first')
    cache_salt: str | None = Field(None, description="only requests of one salt share cached prefixes")

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, content: Any) -> Any:
        """With a better hint than the general one."""
        if not isinstance(content, dict):
            return content
        if content.get("truncation") == "auto":
            raise FieldError("truncation", 'truncation "auto" is not supported; shorten the input, or start anew')
        for name, here in _NAMES_IN_CHATS.items():
            if content.get(name) is not None:
                raise FieldError(name, f"{name} is not supported; here it is {here}")
        return {name: value for name, value in content.items() if name not in _NAMES_IN_CHATS}

    @model_validator(mode="after")
    def _check(self) -> ResponseBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams; set stream, or leave it out")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise RequestError(f"include: {name!r:.80} is not supported; {' and '.join(_INCLUDABLE)} are")
        if self.top_logprobs and not self.with_logprobs:
            raise RequestError(f"top_logprobs needs {_LOGPROBS} in include; add it, or leave top_logprobs out")
        if self.background and self.store is False:
            raise RequestError("background needs store: the response would be lost; leave store out")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise RequestError(f"metadata must have at most {MAX_METADATA} pairs, not {len(metadata)}")
        if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in metadata.items()):
            raise RequestError(
                f"metadata must have keys of at most {_MAX_KEY} characters, values of at most {_MAX_VALUE}"
            )
        return self

    @property
    def with_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    @property
    def format(self) -> TextFormat:
        chosen = self.text and self.text.format
        return chosen or TextFormat(type="text")
