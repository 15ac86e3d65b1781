"""`noria serve`: a model behind an HTTP server that speaks OpenAI's API."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

from noria.cli import options
from noria.cli.display import fetch, note
from noria.cli.hosts import follow_if_told
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.server.log import show_access_log
from noria.server.settings import ServerConfig

_TEXT = """Serves a model over HTTP: /v1/chat/completions, /v1/responses, /v1/completions, /v1/models, /tokenize,
/detokenize, and /health, /ready, /metrics, /version, and a chat page at /.

NORIA_API_KEY in the environment is one more --api-key. SIGTERM finishes what runs and takes nothing new."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "serve",
        _TEXT,
        args,
        [options.model_argument()],
        server=options.options_of(ServerConfig),
        engine=options.engine_options(offer=("seed",)),
    )
    config = ServerConfig(**options.values_of(chosen.server))
    if key := os.environ.get("NORIA_API_KEY"):
        config = dataclasses.replace(config, api_key=(*config.api_key, key))
    engine = EngineConfig(model=chosen.model, **options.values_of(chosen.engine))
    if config.replicas > 1 and engine.nnodes > 1:
        raise ConfigError("replicas and nnodes cannot be used together: a replica is one host; leave one of them out")
    path = fetch(engine.model, engine.revision)
    follow_if_told(engine, path)
    logging.basicConfig(format="%(asctime)s server %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        if config.replicas > 1:
            _serve_replicas(engine, config, chosen.model)
            return 0
        if config.access_log:
            show_access_log()
        from noria.server.lifecycle import serve  # and with it FastAPI, which no other command needs
    except ImportError as error:
        raise ConfigError(f"noria serve needs the package {error.name}; install noria with its dependencies") from None
    serve(dataclasses.replace(engine, model=str(path), revision=None), config, chosen.model, note)
    return 0


def _serve_replicas(engine: EngineConfig, config: ServerConfig, model: str) -> None:
    """The model is found on each machine anew."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers, unless it is told not to
    # Seconds. With its own 5 it ends the process that is to have the address again and again on a busy machine, before
    # that has imported what it needs.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    try:
        from noria.server.replicas.ray_serve import serve_replicas
    except ImportError as error:
        raise ConfigError(
            f"replicas need the package {error.name}; install noria with the extra ray: noria[ray]"
        ) from None
    serve_replicas(engine, config, model, note)
