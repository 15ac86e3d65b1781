"""What is given back after the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")

_SCRIPT = """
import jax, jax.numpy as jnp
from noria.runner.resident import give_back_memory

def of_files():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssFile")]
    return int(line.split()[1]) // 1024

f = jax.jit(lambda x: jnp.sort(x * 2).sum())
first = f(jnp.arange(8.0))
before = of_files()
give_back_memory()
after = of_files()
assert after < before - 30, (before, after)
assert f(jnp.arange(8.0)) == first == jax.jit(lambda x: jnp.sum(x + x))(jnp.arange(8.0))
assert of_files() < before - 10, (before, of_files())
"""


def test_code_of_the_start_leaves_memory_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
