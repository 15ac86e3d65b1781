"""Replicas under Ray Serve: it places them in the cluster, watches over them, and has the address.

Ray sends an answer on as a generator. In front is one deployment, which reads a request and asks the replica that
`routing.preferred` likes best.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from noria.config import EngineConfig
from noria.errors import ConfigError, UnavailableError
from noria.server.errors import ApiError, api_error
from noria.server.log import show_access_log
from noria.server.replicas.relay import AnswerHead, RelayedRequest
from noria.server.replicas.replica import EngineReplica
from noria.server.replicas.resources import check_room, resources_of, say
from noria.server.replicas.routing import preferred, routing_key
from noria.server.requests import read_body
from noria.server.settings import ServerConfig

_log = logging.getLogger(__name__)
_APPLICATION = "noria"
_MOST_ONGOING = 100_000  # requests of the front: the replicas refuse what is too much, with a reason
_HEALTH_S = 5.0
_START_RETRIES = 1  # what is wrong with the options is wrong the next time, too
_GRACE_S = 15.0  # beyond drain_timeout, for an engine to end


class PrefixRouter(RequestRouter):
    """See routing.preferred. The key comes with the call; the loads are Ray's count of what it has sent."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counts = self.replica_queue_len_cache
        loads = {name: counts.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        key = None if pending_request is None else pending_request.kwargs.get("key")
        return [[by_id[name]] for name in preferred(key, loads)]


class Replica:
    """The actor: what Ray calls."""

    async def __init__(self, engine: EngineConfig, config: ServerConfig, name: str) -> None:
        if config.access_log:
            show_access_log()
        self._replica = await EngineReplica.start(engine, config, name)

    async def answer(self, request: RelayedRequest, key: str | None) -> AsyncGenerator[AnswerHead | bytes]:
        """key: for the router."""
        async for part in self._replica.answer(request):
            yield part

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.close()


class Front:
    """Reads a request, has it answered, and passes the parts of the answer on."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request, self._max_body_bytes)
        except ApiError as error:
            return error.response()
        client = request.client.host if request.client else None
        relayed = RelayedRequest(
            request.method, request.url.path, request.url.query.encode(), request.headers.raw, body, client
        )
        parts = self._replicas.answer.remote(relayed, key=routing_key(body) if body else None)
        try:
            head = await anext(parts)
        except Exception:  # of Ray's, of many types
            _log.exception("a replica did not answer")
            return api_error(UnavailableError("the replica that had the request is gone; try again")).response()
        assert isinstance(head, AnswerHead)
        response = StreamingResponse(_rest(parts), head.status)
        response.raw_headers = head.headers
        return response


async def _rest(parts: Any) -> AsyncGenerator[bytes]:
    async for part in parts:
        yield part


def serve_replicas(engine: EngineConfig, config: ServerConfig, name: str, note: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, in the Ray cluster that there is (RAY_ADDRESS, or one that `ray start` made on
    this machine) or in one of its own.

    engine: its model is a path or name that means the same on every machine of the cluster. Raises ConfigError when the
    cluster is too small, or Ray Serve or a replica cannot start.
    """
    ray.init(logging_level=logging.WARNING, log_to_driver=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray had its own
        signal.signal(number, lambda *_: stop.set())
    try:
        needs = resources_of(engine, ray.cluster_resources())
        check_room(needs, config.replicas, ray.cluster_resources())
        _start_serve(config)
        note(f"starting {config.replicas} replicas, with {say(needs)} each")
        try:
            serve.run(_application(engine, config, name, needs), name=_APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise ConfigError(f"the replicas did not start: {_reason(str(error))}") from None
        note(f"noria serves {', '.join(config.served_model_name or (name,))} at http://{config.host}:{config.port}")
        stop.wait()
        note("shutting down")
    finally:
        serve.shutdown()
        ray.shutdown()


def _start_serve(config: ServerConfig) -> None:
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port))
    except (RuntimeError, TimeoutError, RayError) as error:
        raise ConfigError(f"Ray Serve did not start at {config.host}:{config.port}: {_reason(str(error))}") from None


def _application(engine: EngineConfig, config: ServerConfig, name: str, needs: Mapping[str, float]) -> Any:
    replicas = serve.deployment(
        Replica,
        num_replicas=config.replicas,
        ray_actor_options=_actor_options(needs),
        max_ongoing_requests=config.max_queued_requests + (engine.max_num_seqs or 256),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=config.drain_timeout + _GRACE_S,
        health_check_period_s=_HEALTH_S,
        max_constructor_retry_count=_START_RETRIES,
    ).bind(engine, config, name)
    front = serve.deployment(
        Front,
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_timeout_s=config.drain_timeout + _GRACE_S,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas, config.max_body_bytes)


def _actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    return options | {"resources": {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}}


def _reason(text: str) -> str:
    """The last line of Ray's report that names an error of noria's, or its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("noria.errors.")]
    return ours[-1] if ours else lines[0]
