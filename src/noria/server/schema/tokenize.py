"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import Field, model_validator

from noria.errors import RequestError
from noria.server.schema.base import Body
from noria.server.schema.chat import ConversationBody, Message
from noria.server.schema.sampling import TokenIds


class TokenizeBody(ConversationBody):
    """A text, or a conversation for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)  # type: ignore[assignment]  # prompt may stand for it
    add_special_tokens: bool | None = Field(None, description="of a text: true; the chat template writes its own")
    return_token_strs: bool | None = Field(None, description="answer with the tokens' texts as well")

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt or messages must be given, and not both")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} is for messages; leave it out")
        elif self.add_special_tokens is not None:
            raise RequestError("add_special_tokens is for a prompt; leave it out")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
