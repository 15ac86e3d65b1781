"""What all tests share. The environment is set before any test module can import jax or a client of the Hub."""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # results are compared bit for bit, so every machine runs them on the same kind
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that forgets to stay at home fails at once instead of downloading

# The first example of a shape compiles, so the time of one example says nothing.
hypothesis.settings.register_profile("noria", deadline=None, print_blob=True)
hypothesis.settings.load_profile("noria")


@pytest.fixture(scope="session")
def compile_cache_dir(pytestconfig: pytest.Config) -> str:
    """Folder for the option of the same name: engines of one run, and of later runs, share what they compiled.

    Lives in pytest's own cache, so `pytest --cache-clear` empties it.
    """
    return str(pytestconfig.cache.mkdir("noria-programs"))
