"""Chat templates that know tools, in the manner of real models, on the tokenizer of the tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from noria.text.tokenizer import Tokenizer, load_tokenizer

QWEN = """
{%- if tools %}{{ '<|user|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- 'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|' + ('user' if message.role == 'tool' else message.role) + '|>' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if thinking is defined and thinking %}{{ '<think>' }}{% endif %}{% endif %}"""
LLAMA = """
{%- if tools %}{{ '<|start_header_id|>{"name": function name, "parameters": {}}' }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments + '!' }}{% endfor %}{% endfor %}"""
MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[TOOL_CALLS][' }}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""
PYTHONIC = """
{%- if tools %}{{ '[func_name1(a=1)]' }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""
UNKNOWN = """
{%- if tools %}{{ '<|tool|>' }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""


def with_template(folder: Path, template: str, into: Path, special: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer of a folder with another chat template; special: the texts of its ids 3, 4, ... from then on."""
    copy = shutil.copytree(folder, into)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    library: dict[str, Any] = json.loads((copy / "tokenizer.json").read_text())
    for token_id, text in enumerate(special, 3):
        token = next(token for token in library["added_tokens"] if token["id"] == token_id)
        vocabulary = library["model"]["vocab"]
        vocabulary[text] = vocabulary.pop(token["content"])
        token["content"] = text
    (copy / "tokenizer.json").write_text(json.dumps(library))
    return load_tokenizer(copy)
