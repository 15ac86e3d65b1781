"""Tool calls as structural tags, so that structured output makes a model write them, in the format it knows.

The tags are those of xgrammar and vLLM: {"format": {"type": ..., ...}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from noria.text.reasoning.base import ReasoningFormat, Thinking

Node = Mapping[str, Any]
NO_ARGUMENTS: Node = MappingProxyType({"type": "object", "properties": {}, "additionalProperties": False})
ANY_ARGUMENTS: Node = MappingProxyType({"type": "object"})


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: Node | None  # JSON schema of the arguments; None: there are none
    strict: bool = False  # the schema holds also when the model calls unasked


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a format writes calls: `before`, calls with `between` in between, `after`. NAME in `begin` is the tool's."""

    begin: str  # of a call, up to its arguments
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""  # what tells a call from text around it, and what `begin` begins with; "": nothing does
    quotes_name: bool = True

    @property
    def looks_like_json(self) -> bool:
        """Whether an answer in JSON may begin as a call does. A grammar then cannot have both: it reads greedily."""
        return (self.before + self.begin).startswith(("{", "[{"))


def calls(spelling: Spelling, tools: Sequence[Tool], *, parallel: bool) -> Node:
    """One call or, with `parallel`, more, and nothing else. The arguments follow the tools' schemas."""
    tags = [_tag(spelling, tool.name, NO_ARGUMENTS if tool.schema is None else tool.schema) for tool in tools]
    many = {"type": "tags_with_separator", "tags": tags, "separator": spelling.between, "at_least_one": True}
    around = [_const(text) for text in (spelling.before, spelling.after)]
    return _sequence([around[0], {**many, "stop_after_first": not parallel}, around[1]])


def text_with_calls(spelling: Spelling, tools: Sequence[Tool]) -> Node:
    """Free text and calls in it; where a tool is strict, its arguments follow its schema. Needs a trigger."""
    tags = []
    for tool in tools:
        schema = NO_ARGUMENTS if tool.schema is None else tool.schema
        tags.append(_tag(spelling, tool.name, schema if tool.strict else ANY_ARGUMENTS))
    return {"type": "triggered_tags", "triggers": [spelling.trigger], "tags": tags}


def either(*nodes: Node) -> Node:
    return {"type": "or", "elements": list(nodes)}


def after_reasoning(node: Node, reasoning: ReasoningFormat | None, thinking: Thinking) -> Node:
    """`node` behind what the model thinks, if it does: structure is for the answer."""
    if reasoning is None or thinking == "never":
        return node
    rest = [{"type": "any_text"}, _const(reasoning.end), {"type": "regex", "pattern": r"\s*"}, node]
    if thinking == "begun":
        return _sequence(rest)
    return either(_sequence([_const(reasoning.begin), *rest]), node)


def _tag(spelling: Spelling, name: str, schema: Node) -> Node:
    begin = spelling.begin.replace("NAME", json.dumps(name) if spelling.quotes_name else name)
    content = {"type": "json_schema", "json_schema": dict(schema)}
    return {"type": "tag", "begin": begin, "content": content, "end": spelling.end}


def _const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def _sequence(elements: Sequence[Node]) -> Node:
    return {"type": "sequence", "elements": [each for each in elements if each != _const("")]}
