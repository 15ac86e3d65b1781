"""How the served model writes tool calls and reasoning: chosen by option, or recognized by its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noria.server.settings import ServerConfig
from noria.text.reasoning import formats as reasoning_formats
from noria.text.reasoning.base import ReasoningFormat
from noria.text.tokenizer import Tokenizer
from noria.text.tools import formats as tool_formats
from noria.text.tools.base import ToolParser
from noria.text.tools.structure import Spelling


@dataclass(frozen=True, slots=True)
class Dialect:
    tool_format: str | None  # its name; None: not known
    tool_parser: type[ToolParser] | None
    spelling: Spelling | None  # of calls, where a grammar can make the model write them
    reasoning: ReasoningFormat | None
    # Markers that are special tokens are in the text only when special tokens are not skipped.
    has_special_calls: bool
    has_special_reasoning: bool


def dialect_of(config: ServerConfig, tokenizer: Tokenizer) -> Dialect:
    default = tokenizer.template_source() or ""
    with_tools = tokenizer.template_source("tool_use") or default
    tool_format, reasoning_format = _chosen(config.tool_call_parser), _chosen(config.reasoning_parser)
    if config.tool_call_parser == "auto":
        tool_format = tool_formats.recognize(with_tools)
    if config.reasoning_parser == "auto":
        reasoning_format = reasoning_formats.recognize(default)
    parser = tool_formats.TOOL_PARSERS[tool_format] if tool_format else None
    reasoning = reasoning_formats.REASONING_FORMATS[reasoning_format] if reasoning_format else None
    return Dialect(
        tool_format,
        parser,
        parser.spelling(with_tools) if parser else None,
        reasoning,
        parser is not None and _are_special(parser.MARKERS, tokenizer),
        reasoning is not None and _are_special((reasoning.begin, reasoning.end), tokenizer),
    )


def _chosen(option: str) -> str | None:
    return None if option in ("auto", "none") else option


def _are_special(markers: Iterable[str], tokenizer: Tokenizer) -> bool:
    ids = {token_id for marker in markers for token_id in tokenizer.encode(marker, add_special_tokens=False)}
    return not ids.isdisjoint(tokenizer.special_ids)
