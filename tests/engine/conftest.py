"""One small engine for most tests; what it is given to do must leave it as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_idle

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
def shared_llm(options: Options) -> Iterator[LLM]:
    with LLM(**options) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    check_idle(shared_llm)
