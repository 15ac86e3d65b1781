"""One small engine for most tests; what it is given to do must leave it as it was found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import CONFIG, random_tensors, save_head
from engine_checks import check_idle
from safetensors.numpy import load_file, save_file

from noria import LLM

Options = dict[str, Any]


@pytest.fixture(scope="session")
def options(tiny_text_model: Path, compile_cache_dir: str) -> Options:
    """Of every engine here: few and small programs, steps that cut prompts, a pool of 8 requests of full length."""
    return {
        "model": str(tiny_text_model),
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "num_blocks_override": 65,
        "compile_cache_dir": compile_cache_dir,
        "strict_compile": True,
    }


@pytest.fixture(scope="session")
def similar_model(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a little noise in its weights."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    shutil.copytree(tiny_text_model, folder)
    rng = np.random.default_rng(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: (value + 0.05 * value.std() * rng.standard_normal(value.shape)).astype(value.dtype)
        for name, value in weights.items()
    }
    save_file(noisy, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head of random weights: greedily it guesses next to nothing, and at high temperatures much, where the
    noise, which it shares with the model, is what counts."""
    return save_head(tmp_path_factory.mktemp("heads") / "head", CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="session")
def shared_llm(options: Options) -> Iterator[LLM]:
    with LLM(**options) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    check_idle(shared_llm)
