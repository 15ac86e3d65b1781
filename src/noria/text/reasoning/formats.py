"""The formats of reasoning by vLLM's names, and which of them a chat template knows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from noria.text.reasoning.base import ReasoningFormat

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": ReasoningFormat("<think>", "</think>"),
        "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    }
)


def recognize(template: str) -> str | None:
    """The name of the format that a chat template writes or takes out of earlier answers; None for none."""
    if "<think>" in template or "</think>" in template:
        return "qwen3"
    return "mistral" if "[THINK]" in template else None
