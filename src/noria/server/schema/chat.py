"""The body of /v1/chat/completions, and the messages in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from noria.errors import RequestError
from noria.server.schema.base import Body
from noria.server.schema.sampling import UNSUPPORTED, SamplingBody, StreamOptions
from noria.text.content import plain_text

_CONTENT_SCHEMA: Mapping[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


class Message(Body):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "tool_calls": ([],),
            "function_call": (),
            "refusal": (),
            "audio": (),
            "annotations": ([],),
            "reasoning_content": (),
            "reasoning": (),
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, PlainValidator(plain_text), WithJsonSchema(dict(_CONTENT_SCHEMA))]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: a developer is what OpenAI calls the system for its newer models."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **name}


class ConversationBody(Body):
    """What a chat template is given."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(None, description="end the prompt where an answer begins; true")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the template")

    def template_options(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        if taken := given.keys() & {"messages", "tools", "add_generation_prompt", "tokenizer_or_template"}:
            raise RequestError(f"chat_template_kwargs must not contain {sorted(taken)[0]}")
        return {**given, "add_generation_prompt": self.add_generation_prompt is not False}

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


class ChatBody(SamplingBody, ConversationBody):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **UNSUPPORTED,
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "parallel_tool_calls": (True, False),
            "reasoning_effort": (),
            "verbosity": (),
            "web_search_options": (),
            "store": (False,),
            "metadata": ({},),
            "echo": (False,),
            "continue_final_message": (False,),
            "add_special_tokens": (False,),
            "chat_template": (),
            "documents": ([],),
            "include_reasoning": (True,),
        }
    )

    model: str | None = None
    max_completion_tokens: int | None = Field(None, description="as many as max_model_len leaves when left out")
    max_tokens: int | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = Field(None, description="answer with the log-probability of each token")
    top_logprobs: int | None = Field(None, description="and with those of so many of the likeliest")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="changes nothing")
    priority: int | None = Field(None, description='for the scheduling policy "priority": the lower comes first')
    cache_salt: str | None = Field(None, description="only requests of one salt share cached prefixes")
    return_token_ids: bool | None = Field(None, description="answer with the token ids as well")

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams; set stream, or leave it out")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError("max_tokens is the older name of max_completion_tokens; give one of them")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs does not work with stream; leave one of them out")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true, or leave it out")
        self._params = self.sampling_params(
            max_tokens=self.max_tokens if both[1] is None else both[1],
            logprobs=self.num_top if self.logprobs else None,
        )
        return self

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0
