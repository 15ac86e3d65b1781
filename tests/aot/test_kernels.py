"""The kernels of noria compiled for every chip by libtpu, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from noria.aot import devices
from noria.aot.environment import ENVIRONMENT

needs_libtpu = pytest.mark.skipif(not devices.is_available(), reason="libtpu is not installed")


def compiled(chip: str, kernel: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, **dict(ENVIRONMENT)}
    command = [sys.executable, str(script), chip, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("kind", ["attention", "latent"])
def test_attention(chip: str, kind: str) -> None:
    """The cache, which is the largest argument, is not copied; queries are, into whole lines."""
    for case in compiled(chip, kind):
        assert case["temporary"] < 0.2 * case["largest"], case


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_grouped_products(chip: str) -> None:
    """Of four layers' matrices one layer's are read, and none is copied."""
    for case in compiled(chip, "grouped"):
        assert case["temporary"] < 2**20, case
