"""Structural tags: free text in which certain marks begin parts that follow a grammar, as tool calls do.

The format is xgrammar's, which vLLM's structural_tag takes: {"format": {"type": ..., ...}}, and the older
{"structures": [{"begin", "schema", "end"}], "triggers": [...]}. It is translated to a Lark grammar of llguidance's, in
which marks that are special tokens of the vocabulary are these tokens, not their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llguidance import regex_to_lark

from noria.errors import RequestError

Node = Mapping[str, Any]
_FREE_TEXT = r"/(.|\n)*/"
_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "const_string": ("value",),
        "json_schema": ("json_schema",),
        "regex": ("pattern",),
        "any_text": (),
        "sequence": ("elements",),
        "or": ("elements",),
        "tag": ("begin", "content", "end"),
        "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
        "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    }
)


def structural_tag_grammar(
    tag: Node, special_tokens: Mapping[str, int], with_options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> str:
    """The Lark grammar of a structural tag. special_tokens: text -> id. with_options: applied to every JSON schema.

    Raises RequestError, which names the field that is wrong.
    """
    if tag.get("type", "structural_tag") != "structural_tag":
        raise _wrong("type must be structural_tag")
    writer = _Writer(special_tokens, with_options)
    root = tag["format"] if "format" in tag else _older(tag)
    writer.rules.append(f"start: {writer.node(root, is_last=True)}")
    return "%llguidance {}\n" + "\n".join(writer.rules)


def _older(tag: Node) -> Node:
    """The older form as triggered_tags."""
    if unknown := set(tag) - {"type", "structures", "triggers"}:
        raise _wrong(f"unknown field {min(unknown)}; give format, or structures and triggers")
    tags = [
        {
            "type": "tag",
            "begin": _field(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": _field(each, "schema", dict)},
            "end": _field(each, "end", str),
        }
        for each in _items(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects rules; every method returns an expression for the right side of one."""

    def __init__(
        self, special_tokens: Mapping[str, int], with_options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        self.rules: list[str] = []
        self._special = special_tokens
        self._with_options = with_options
        found = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, found)) or r"(?!)")

    def node(self, node: Any, *, is_last: bool) -> str:
        """is_last: nothing follows it."""
        match _kind(node):
            case "const_string":
                return self._literal(_field(node, "value", str))
            case "json_schema":
                schema = self._with_options(_field(node, "json_schema", dict))
                return "%json " + json.dumps(schema, ensure_ascii=False)
            case "regex":
                return f"/{regex_to_lark(_field(node, 'pattern', str))}/"
            case "any_text":
                if not is_last:
                    raise _wrong("any_text must come last, be followed by a const_string, or be the content of a tag")
                return self._rule(_FREE_TEXT, "TEXT")
            case "sequence":
                return self._sequence(_items(node, "elements"), is_last=is_last)
            case "or":
                return self._rule(" | ".join(self.node(each, is_last=is_last) for each in _items(node, "elements")))
            case "tag":
                return self._tag(node)
            case "triggered_tags":
                if not is_last:
                    raise _wrong("triggered_tags are in free text, so they must come last")
                return self._triggered(node)
        return self._separated(node)

    def _rule(self, right: str, name: str = "r", mark: str = "") -> str:
        """A new rule; returns its name."""
        name = f"{name}{len(self.rules)}"
        self.rules.append(f"{name}{mark}: {right}")
        return name

    def _literal(self, text: str) -> str:
        """Text, with special tokens in it as tokens."""
        parts, start = [], 0
        for found in self._split.finditer(text):
            parts += [json.dumps(text[start : found.start()], ensure_ascii=False)] * (found.start() > start)
            parts.append(f"<[{self._special[found[0]]}]>")
            start = found.end()
        if start < len(text) or not parts:
            parts.append(json.dumps(text[start:], ensure_ascii=False))
        return " ".join(parts)

    def _until(self, end: str) -> str:
        """Free text and the first `end` after it."""
        if not end:
            raise _wrong("what ends a free text must not be empty")
        if self._special and self._split.match(end):  # free text has no special tokens
            return self._rule(f"{self._rule(_FREE_TEXT, 'TEXT')} {self._literal(end)}")
        return self._rule(f"{_FREE_TEXT} {json.dumps(end, ensure_ascii=False)}", "until", "[lazy]")

    def _sequence(self, elements: list[Node], *, is_last: bool) -> str:
        parts, rest = [], list(elements)
        while rest:
            each = rest.pop(0)
            if _kind(each) == "any_text" and rest and _kind(rest[0]) == "const_string":
                parts.append(self._until(_field(rest.pop(0), "value", str)))
            else:
                parts.append(self.node(each, is_last=is_last and not rest))
        return self._rule(" ".join(parts))

    def _tag(self, tag: Node, begun: str = "") -> str:
        """begun: how much of `begin` is written already."""
        begin, end = _field(tag, "begin", str)[len(begun) :], _field(tag, "end", str)
        content = _field(tag, "content", dict)
        parts = [self._literal(begin)] if begin else []
        if _kind(content) == "any_text":
            parts.append(self._until(end))
        else:
            parts += [self.node(content, is_last=False), *([self._literal(end)] if end else [])]
        return self._rule(" ".join(parts))

    def _triggered(self, node: Node) -> str:
        """Free text; where a trigger comes, one of the tags that begin with it."""
        triggers, tags = _items(node, "triggers", str), _items(node, "tags")
        alternatives = []
        for trigger in triggers:
            if not trigger:
                raise _wrong("triggers must not contain an empty text")
            mine = [tag for tag in tags if _field(tag, "begin", str).startswith(trigger)]
            if not mine:
                raise _wrong(f"no tag begins with the trigger {trigger!r}")
            bodies = " | ".join(self._tag(tag, trigger) for tag in mine)
            alternatives.append(self._rule(f"{self._until(trigger)} ({bodies})"))
        for tag in tags:
            if not any(_field(tag, "begin", str).startswith(trigger) for trigger in triggers):
                raise _wrong(f"the tag that begins with {tag['begin']!r} has no trigger")
        any_tag = self._rule(" | ".join(alternatives))
        if _flag(node, "stop_after_first"):
            text = "" if _flag(node, "at_least_one") else f" | {self._rule(_FREE_TEXT, 'TEXT')}"
            return self._rule(any_tag + text)
        return self._rule(f"{any_tag}{'+' if _flag(node, 'at_least_one') else '*'} {self._rule(_FREE_TEXT, 'TEXT')}")

    def _separated(self, node: Node) -> str:
        """Tags with a text between each two."""
        any_tag = self._rule(" | ".join(self._tag(tag) for tag in _items(node, "tags")))
        if not _flag(node, "stop_after_first"):
            separator = self._literal(_field(node, "separator", str))
            any_tag = self._rule(f"{any_tag} ({separator} {any_tag})*")
        return any_tag if _flag(node, "at_least_one") else self._rule(f"{any_tag}?")


def _kind(node: Any) -> str:
    """Its type, when it has that and no unknown fields."""
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _wrong(f"a format must have a type, one of {', '.join(_FIELDS)}, not {kind!r}")
    if unknown := set(node) - {"type", *_FIELDS[kind]}:
        raise _wrong(f"{kind} has no field {min(unknown)}; it has {', '.join(_FIELDS[kind]) or 'none'}")
    return kind


def _items(node: Node, name: str, kind: type = dict) -> list[Any]:
    items = node.get(name)
    if not isinstance(items, list) or not items or not all(isinstance(each, kind) for each in items):
        what = "texts" if kind is str else "objects"
        raise _wrong(f"{name} must be a list of {what} that is not empty")
    return items


def _field(node: Node, name: str, kind: type) -> Any:
    value = node.get(name)
    if not isinstance(value, kind):
        raise _wrong(f"{name} must be {'a text' if kind is str else 'an object'}, not {json.dumps(value)[:40]}")
    return value


def _flag(node: Node, name: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(f"{name} must be true or false")
    return value


def _wrong(what: str) -> RequestError:
    return RequestError(f"structured_outputs: structural_tag: {what}")
