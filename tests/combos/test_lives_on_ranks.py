"""Lives on several ranks. As elsewhere in this folder, every bit of every hidden state must be that of the request
alone: requests are divided among devices, and none is computed by several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_worker import COMBOS

WORKER = Path(__file__).with_name("ranks_worker.py")
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBOS)
def test_answers_are_those_of_the_request_alone(name: str, tmp_path: Path, compile_cache_dir: str) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), compile_cache_dir, name, "0"],
        env={**os.environ, **EIGHT_DEVICES},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
