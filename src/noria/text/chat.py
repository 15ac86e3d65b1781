"""Chat templates: messages to the text of a prompt, as the Jinja templates that models bring expect it.

The environment is the one Hugging Face documents for chat templates: sandboxed, blocks trimmed, loop controls, a
`tojson` that does not escape for HTML, `raise_exception`, `strftime_now`, and {% generation %} blocks.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from noria.errors import RequestError
from noria.text.content import plain_text

if TYPE_CHECKING:
    from noria.text.tokenizer import Tokenizer


class ChatTemplate:
    """A compiled chat template. Raises RequestError when the source is no valid template."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template is not valid: {_one_line(error)}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises RequestError with the template's own complaint."""
        try:
            return self._template.render(variables)  # by position: a variable may be called `self`
        # a template is a program over the user's messages: whatever it raises is about this request
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {_one_line(error)}") from None


def render_chat(
    tokenizer_or_template: Tokenizer | str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """The prompt of a conversation.

    messages: dicts with "role" and usually "content": a text, or a list of parts like {"type": "text", "text": ...},
    which become a line each. tools: function schemas, for templates that know them; a model's template named
    "tool_use" is then preferred. continue_final_message: the prompt ends where the content of the last message does,
    which must be the assistant's, so that the model goes on with it; add_generation_prompt is then of no meaning.
    extra: further variables of the template, such as enable_thinking; they come before the special tokens' names.
    Encode the result with add_special_tokens=False (or use
    `encode_chat`): the template writes the beginning of the sequence itself. Raises RequestError.
    """
    messages = _plain(messages)
    mark = uuid.uuid4().hex if continue_final_message else ""
    if mark:
        messages, add_generation_prompt = _marked(messages, mark), False
    if isinstance(tokenizer_or_template, str):
        template, special_tokens = ChatTemplate(tokenizer_or_template), {}
    else:
        template = tokenizer_or_template.compiled_template("tool_use") if tools else None
        template = template or tokenizer_or_template.compiled_template()
        special_tokens = tokenizer_or_template.special_tokens
    if template is None:
        raise RequestError(
            "this model has no chat template; send a plain prompt, or use an instruction-tuned model whose "
            "tokenizer_config.json, chat_template.jinja or GGUF metadata has one"
        )
    variables = {"documents": None, **special_tokens, **extra}
    given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    text = template.render({**variables, **given})
    return _until(text, mark) if mark else text


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """Token ids of `render_chat(tokenizer, messages, **options)`, without a second beginning of sequence."""
    return tokenizer.encode(render_chat(tokenizer, messages, **options), add_special_tokens=False)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant said, for training; here it is just a scope."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _plain(messages: Any) -> list[dict[str, Any]]:
    """The messages, checked, with contents that are text: templates of text models know no other."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('messages must be a list like [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'message {index} must be a dict with a "role", not {message!r:.80}')
    return [
        {**message, "content": plain_text(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """The last message with a mark at the end of its content: no template tells where it puts that end."""
    *earlier, last = messages
    if last["role"] != "assistant" or not isinstance(last.get("content"), str) or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of the role assistant with a content that is not empty"
        )
    return [*earlier, {**last, "content": last["content"] + mark}]


def _until(text: str, mark: str) -> str:
    if text.count(mark) != 1:
        raise RequestError(
            "continue_final_message is not possible: the chat template does not show the last message as it stands"
        )
    return text.partition(mark)[0]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
