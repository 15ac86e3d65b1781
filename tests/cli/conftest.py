"""Models and engine options for the tests of the command line, and the command run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import CHAT_TEMPLATE, Outcome, make_model

from noria.cli.main import main


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("chat_model"), chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a chat template."""
    return str(make_model(tmp_path_factory.mktemp("plain_model")))


@pytest.fixture(scope="session")
def small(compile_cache_dir: str) -> list[str]:
    """Options of an engine that starts quickly."""
    sizes = ["--max-model-len", "96", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
    return [*sizes, "--dtype", "float32", "--compile-cache-dir", compile_cache_dir]


@pytest.fixture
def noria(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*args: str) -> Outcome:
        status = main(args)
        return Outcome(status, *capsys.readouterr())

    return run
