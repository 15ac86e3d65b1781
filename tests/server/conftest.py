"""The tokenizer of the tiny model, and one real server for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, small_options

from noria.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_text_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_text_model)


@pytest.fixture(scope="session")
def small(compile_cache_dir: str) -> list[str]:
    return small_options(compile_cache_dir)


@pytest.fixture(scope="session")
def server(
    tiny_text_model: Path, small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Shared by all tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(tiny_text_model, log, *small, "--api-key", "secret", "--served-model-name", "tiny") as server:
        server.wait_ready()
        yield server
        assert server.metric("compiles_after_warmup_total") == 0
    assert "Traceback" not in log.read_text()
