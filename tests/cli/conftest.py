"""Models and engine options for the tests of the command line, and the command run in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from command_line import CHAT_TEMPLATE, Outcome, make_model

from noria.aot.environment import ENVIRONMENT
from noria.cli.main import main


@pytest.fixture(autouse=True)
def environment_of_libtpu() -> Iterator[None]:
    """Commands that compile for TPUs change it; afterwards it is as before."""
    before = {name: os.environ.get(name) for name, _ in ENVIRONMENT}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


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
