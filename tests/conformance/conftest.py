"""A server of the small real model, as its users start it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_process import ServerProcess

from noria.config import cache_home
from noria.errors import WeightsError
from noria.weights.hub import resolve_model

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_path() -> Path:
    try:
        return resolve_model(MODEL, None, cache_home())
    except WeightsError as error:
        pytest.skip(f"{MODEL} is not here: {error}")


@pytest.fixture(scope="session")
def server(
    model_path: Path, compile_cache_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("conformance") / "log"
    sizes = ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    others = ["--strict-compile", "--compile-cache-dir", compile_cache_dir, "--memory-utilization", "0.3"]
    with ServerProcess(model_path, log, *sizes, *others, "--served-model-name", MODEL, "--api-key", "key") as server:
        server.wait_ready()
        yield server
        server.wait_idle()
        assert server.metric("compiles_after_warmup_total") == 0
    assert "Traceback" not in log.read_text()
