"""The golden values as dataclasses, for parametrized tests; what they are and how they were made is in README.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens (past any end token); at each step the gap of the two best logits and (if known) the second."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    runners_up: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelPrompt:
    """A prompt of a tiny model, with its float32 logits [len(token_ids), vocab] if they were kept."""

    name: str  # short, medium or long
    token_ids: tuple[int, ...]
    continuation: Continuation
    logits: np.ndarray | None


@dataclass(frozen=True)
class ModelCase:
    """A tiny model in Hugging Face format; its values are float32, whatever dtype its weights are stored in."""

    name: str
    folder: Path
    stored_dtype: str
    prompts: tuple[ModelPrompt, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RealPrompt:
    """A prompt of a real model. `float32` is the truth; `llama_cpp` was computed with activations rounded to 8 bits."""

    name: str
    text: str  # as tokenized, after the chat template if there are messages
    messages: tuple[dict[str, str], ...]  # empty unless it is a chat
    token_ids: tuple[int, ...]
    float32: Continuation  # transformers
    llama_cpp_float32: Continuation  # llama.cpp on the weights in float32
    llama_cpp: Continuation


@dataclass(frozen=True)
class RealCase:
    """A real model: name for `noria pull`, its GGUF file and that file's SHA-256."""

    name: str
    file: str
    sha256: str
    prompts: tuple[RealPrompt, ...]

    def __str__(self) -> str:
        return self.name


@cache
def model_cases() -> tuple[ModelCase, ...]:
    """All tiny models, by name."""
    return tuple(_model_case(path.parent) for path in sorted(GOLDEN.glob("models/*/golden.json")))


@cache
def real_cases() -> tuple[RealCase, ...]:
    """All real models, by name."""
    return tuple(_real_case(path) for path in sorted(GOLDEN.glob("real/*.json")))


def _model_case(folder: Path) -> ModelCase:
    golden = json.loads((folder / "golden.json").read_text())
    source = folder
    if "same_as" in golden:
        source = folder.with_name(golden["same_as"])
        golden = json.loads((source / "golden.json").read_text())
    with np.load(source / "golden.npz") as arrays:
        prompts = tuple(
            ModelPrompt(
                name=prompt["name"],
                token_ids=tuple(prompt["token_ids"]),
                continuation=Continuation(tuple(prompt["continuation"]), tuple(prompt["gaps"])),
                logits=arrays.get(prompt["name"]),
            )
            for prompt in golden["prompts"]
        )
    return ModelCase(folder.name, folder, golden["stored_dtype"], prompts)


def _real_case(path: Path) -> RealCase:
    golden = json.loads(path.read_text())
    prompts = tuple(
        RealPrompt(
            name=prompt["name"],
            text=prompt["text"],
            messages=tuple(prompt.get("messages", ())),
            token_ids=tuple(prompt["token_ids"]),
            float32=_continuation(prompt["float32"]),
            llama_cpp_float32=_continuation(prompt["llama_cpp_float32"]),
            llama_cpp=_continuation(prompt["llama_cpp"]),
        )
        for prompt in golden["prompts"]
    )
    return RealCase(path.stem, golden["file"], golden["sha256"], prompts)


def _continuation(found: dict[str, list[Any]]) -> Continuation:
    return Continuation(tuple(found["token_ids"]), tuple(found["gaps"]), tuple(found["runners_up"]))
