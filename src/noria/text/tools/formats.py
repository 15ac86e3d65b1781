"""The formats of tool calls by name, and which of them a chat template teaches its model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from noria.text.tools.base import ToolParser
from noria.text.tools.hermes import HermesParser
from noria.text.tools.llama3_json import Llama3JsonParser
from noria.text.tools.mistral import MistralParser
from noria.text.tools.pythonic import PythonicParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
    }
)


def recognize(template: str) -> str | None:
    """The name of the format that a chat template shows to the model; None for one that is not known.

    <function= and <arg_key> stand in the templates of models that put XML, not JSON, between the tags of Hermes.
    """
    if "<tool_call>" in template and not any(tag in template for tag in ("<function=", "<arg_key>")):
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return None
