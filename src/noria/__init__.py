"""noria: an LLM inference engine for XLA devices.

The public names are imported when they are first used, so that importing a room that is plain Python (the scheduler,
the tokenizers) does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noria.config import EngineConfig, SamplingParams, StructuredOutputsParams
    from noria.engine.async_llm import AsyncLLM
    from noria.engine.hosts.follower import follow
    from noria.engine.llm import LLM
    from noria.engine.logprobs import Logprob
    from noria.engine.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "follow",
]


def __getattr__(name: str) -> Any:
    home = {
        "LLM": "engine.llm",
        "AsyncLLM": "engine.async_llm",
        "SamplingParams": "config",
        "StructuredOutputsParams": "config",
        "EngineConfig": "config",
        "follow": "engine.hosts.follower",
        "Logprob": "engine.logprobs",
        "RequestOutput": "engine.outputs",
        "CompletionOutput": "engine.outputs",
    }.get(name)
    if home is None:
        raise AttributeError(f"module noria has no attribute {name}")
    return getattr(importlib.import_module(f"noria.{home}"), name)
