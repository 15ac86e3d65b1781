"""A command on a host that follows: the same command everywhere, and --node-rank says who answers."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from noria.cli.display import note
from noria.cli.main import Done
from noria.config import EngineConfig
from noria.errors import NoriaError


def follow_if_told(config: EngineConfig, path: Path) -> None:
    """Raises Done when another host leads and this one has followed it to its end. path: where the model is."""
    if not config.node_rank:
        return
    from noria.engine.hosts.follower import follow  # jax comes with it

    try:
        follow(dataclasses.replace(config, model=str(path), revision=None), note, patient=True)
    except NoriaError as error:
        note(f"noria: error: {' '.join(str(error).split())}")
        sys.stdout.flush()
        os._exit(1)  # at an ordinary exit JAX might wait for what a host that is gone was to send
    note("host 0 has ended, and so does this one")
    raise Done
