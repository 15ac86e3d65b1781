"""The body of /v1/chat/completions, and the messages in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from noria.errors import RequestError
from noria.server.schema.base import Body
from noria.server.schema.sampling import UNSUPPORTED, AnsweredBody
from noria.server.schema.tools import ToolBody, ToolCallBody, ToolChoice
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

# What render_chat has as parameters of its own.
_NO_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenizer_or_template")
)


def _describe_roles(schema: dict[str, Any]) -> None:
    """Which fields go with which role, for the OpenAPI document."""
    absent = {"type": "null"}
    no_assistant = dict.fromkeys(("tool_calls", "reasoning", "reasoning_content"), absent)
    users = {"enum": ["system", "developer", "user"]}
    schema["anyOf"] = [
        {"properties": {"role": {"const": "assistant"}, "tool_call_id": absent}},
        {"properties": {"role": users, "tool_call_id": absent, **no_assistant}},
        {
            "properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}, **no_assistant},
            "required": ["tool_call_id"],
        },
    ]


class Message(Body):
    model_config = ConfigDict(json_schema_extra=_describe_roles)
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"function_call": (), "refusal": (), "audio": (), "annotations": ([],)}
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, PlainValidator(plain_text), WithJsonSchema(dict(_CONTENT_SCHEMA))]
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = Field(None, description="of the call that a message of the role tool answers")
    reasoning: str | None = Field(None, description="what the assistant thought, for templates that show it again")
    reasoning_content: str | None = Field(None, description="the older name of reasoning")

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, content: Any) -> Any:
        """An assistant that calls or thinks need not say anything: such a message of this server has no content."""
        if not isinstance(content, dict) or content.get("content") is not None:
            return content
        is_silent = content.get("role") == "assistant" and "content" in content
        return {**content, "content": ""} if is_silent or content.get("tool_calls") else content

    @model_validator(mode="after")
    def _check(self) -> Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise RequestError("a message of the role tool, and no other, must have a tool_call_id")
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(self, name):
                    raise RequestError(f"{name} is for messages of the role assistant")
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise RequestError("reasoning_content is the older name of reasoning; give one of them")
        return self

    def for_template(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """As chat templates know it: a developer is what OpenAI calls the system for its newer models."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if thought := self.reasoning or self.reasoning_content:
            message |= {"reasoning": thought, "reasoning_content": thought}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(arguments_as_text=arguments_as_text) for call in self.tool_calls]
        return message


class ConversationBody(Body):
    """What a chat template is given."""

    messages: list[Message] = Field(min_length=1)
    tools: list[ToolBody] | None = Field(None, description="functions that the model may call")
    add_generation_prompt: bool | None = Field(None, description="end the prompt where an answer begins; true")
    continue_final_message: bool | None = Field(
        None, description="go on with the last message, which is the assistant's, instead of a new one"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the template")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = Counter(tool.function.name for tool in self.tools or ())
        for name, count in names.items():
            if count > 1:
                raise RequestError(f"tools: {count} of them have the name {name!r}; give each its own")
        return self

    @property
    def has_calls(self) -> bool:
        """Of the assistant, in earlier messages."""
        return any(message.tool_calls for message in self.messages)

    def template_options(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        if taken := given.keys() & _NO_VARIABLES:
            raise RequestError(f"chat_template_kwargs must not contain {sorted(taken)[0]}")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt do not work together; leave one of them out"
            )
        return {
            **given,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }

    def template_messages(self, *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
        """arguments_as_text: of calls, instead of an object. A tool's answer gets its name, which templates show."""
        messages = [message.for_template(arguments_as_text=arguments_as_text) for message in self.messages]
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        for message in messages:
            if (name := names.get(message.get("tool_call_id", ""))) is not None:
                message.setdefault("name", name)
        return messages

    def template_tools(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools or ()]


class ChatBody(AnsweredBody, ConversationBody):
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **UNSUPPORTED,
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "reasoning_effort": (),
            "verbosity": ("medium",),
            "prompt_cache_retention": ("in_memory",),
            "web_search_options": (),
            "store": (False,),
            "metadata": ({},),
            "echo": (False,),
            "add_special_tokens": (False,),
            "chat_template": (),
            "documents": ([],),
        }
    )

    model: str | None = None
    max_completion_tokens: int | None = Field(None, description="as many as max_model_len leaves when left out")
    max_tokens: int | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = Field(None, description="answer with the log-probability of each token")
    top_logprobs: int | None = Field(None, description="and with those of so many of the likeliest")
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    include_reasoning: bool | None = Field(None, description="false: answer without what the model thought")
    safety_identifier: str | None = Field(None, description="changes nothing")
    prompt_cache_key: str | None = Field(None, description="changes nothing: every prefix is looked up")

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError("max_tokens is the older name of max_completion_tokens; give one of them")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs does not work with stream; leave one of them out")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true, or leave it out")
        self._check_choice()
        self._params = self.sampling_params(
            max_tokens=self.max_tokens if both[1] is None else both[1],
            logprobs=self.num_top if self.logprobs else None,
        )
        return self

    def _check_choice(self) -> None:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools; add some, or leave it out")
        names = [tool.function.name for tool in self.tools or ()]
        if self.named_tool is not None and self.named_tool not in names:
            raise RequestError(f"tool_choice: there is no tool {self.named_tool!r:.80}; add it to tools")

    @property
    def choice(self) -> Literal["none", "auto", "required", "named"]:
        if not self.tools:
            return "none"
        return "named" if isinstance(self.tool_choice, dict) else self.tool_choice or "auto"

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def offered_tools(self) -> list[ToolBody]:
        """Those that the model is told of."""
        return [] if self.choice == "none" else self.tools or []

    def template_tools(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.offered_tools]

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0
