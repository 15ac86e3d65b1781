"""How hosts find each other: host 0 listens, the others come, and what does not fit together is told to all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from importlib import metadata
from typing import Any

import msgspec

from noria.config import EngineConfig
from noria.engine.hosts.link import Link
from noria.engine.hosts.messages import Failed, Hello, Welcome
from noria.errors import ConfigError, NoriaError, named

# What may differ from host to host: where things lie, and what only host 0 uses.
# fmt: off
_OWN = frozenset((
    "node_rank", "model", "revision", "tokenizer", "chat_template", "skip_tokenizer_init", "compile_cache_dir",
    "compile_threads", "distributed_timeout_seconds",
))
# fmt: on
_HELLO_S = 5.0  # that a new connection gets to say who it is
_RETRY_S = 0.2
_MARGIN_S = 10.0  # after host 0's own time limit, until the others give it up


def gather(config: EngineConfig) -> dict[int, Link]:
    """On host 0: waits for all others, whose links it returns by rank.

    Raises ConfigError when one does not come in time or has other options or versions; all that came are told.
    """
    deadline = time.monotonic() + config.distributed_timeout_seconds
    links: dict[int, Link] = {}
    try:
        with _listener(config) as listener:
            while len(links) < config.nnodes - 1 or any(link.has_ended() for link in links.values()):
                listener.settimeout(max(0.01, min(_RETRY_S, deadline - time.monotonic())))
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    _admit(config, Link(connection), links)
                if time.monotonic() > deadline:
                    raise _missing(config, links)
        for link in links.values():
            link.send(Welcome())
    except BaseException as error:
        reason = error if isinstance(error, NoriaError) else ConfigError(f"host 0 has ended: {error!r}")
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send(Failed(type(reason).__name__, str(reason)))
            link.close()
        raise
    return links


def join(config: EngineConfig) -> Link:
    """On another host: finds host 0 and waits until all are there.

    Raises ConfigError when host 0 is not found or does not welcome this one in time, or what host 0 says is wrong.
    """
    where = f"{config.master_addr}:{config.master_port}"
    deadline = time.monotonic() + config.distributed_timeout_seconds
    why = "nothing answered"
    while time.monotonic() < deadline:
        try:
            link = Link(socket.create_connection((config.master_addr, config.master_port), timeout=_HELLO_S))
        except OSError as error:
            why = str(error.strerror or error)
            time.sleep(_RETRY_S)
            continue
        try:
            if _is_welcome(link, config, deadline + _MARGIN_S):
                return link
            why = "it closed the connection"  # it may start over
        except (OSError, msgspec.MsgspecError) as error:
            why = str(error)
        except BaseException:
            link.close()
            raise
        link.close()
        time.sleep(_RETRY_S)
    raise ConfigError(
        f"host 0 was not found at {where} within {config.distributed_timeout_seconds} s ({why}); start it with the "
        "same nnodes, or check master_addr and master_port"
    )


def _listener(config: EngineConfig) -> socket.socket:
    _listen(config, config.master_port + 1).close()  # JAX's service, which ends the process when it finds it taken
    return _listen(config, config.master_port)


def _listen(config: EngineConfig, port: int) -> socket.socket:
    host = config.master_addr
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=config.nnodes)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(
            f"host 0 cannot listen at {host}:{port}: {reason}; master_addr must be an address of this machine, and "
            "master_port and the port after it free"
        ) from None


def _admit(config: EngineConfig, link: Link, links: dict[int, Link]) -> None:
    """Raises ConfigError when a host has come that can never be one of these."""
    try:
        hello = link.receive(_HELLO_S)
    except (OSError, msgspec.MsgspecError):
        hello = None
    if not isinstance(hello, Hello):  # somebody else's
        link.close()
        return
    before = links.get(hello.rank)
    if not 0 < hello.rank < config.nnodes or (before is not None and not before.has_ended()):
        reason = f"node_rank {hello.rank} is taken or not one of 1 to {config.nnodes - 1}; give every host its own"
        with contextlib.suppress(OSError):
            link.send(Failed(ConfigError.__name__, reason))
        link.close()
        return
    if before is not None:
        before.close()
    links[hello.rank] = link
    _check_same("version of {}", _versions(), hello.versions, hello.rank)
    _check_same("{}", _options(config), hello.options, hello.rank)


def _check_same(what: str, mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    for name in sorted(mine.keys() | theirs.keys()):
        if (here := mine.get(name)) != (there := theirs.get(name)):
            raise ConfigError(
                f"{what.format(name)} is {here!r} on host 0 and {there!r} on host {rank}; it must be the same on all"
            )


def _is_welcome(link: Link, config: EngineConfig, deadline: float) -> bool:
    """False when host 0 closes. Raises what host 0 found wrong."""
    link.send(Hello(config.node_rank, _versions(), _options(config)))
    answer = link.receive(max(0.01, deadline - time.monotonic()))
    if isinstance(answer, Failed):
        raise named(answer.kind, answer.reason)
    return isinstance(answer, Welcome)


def _missing(config: EngineConfig, links: dict[int, Link]) -> ConfigError:
    there = {rank for rank, link in links.items() if not link.has_ended()}
    ranks = ", ".join(str(rank) for rank in range(1, config.nnodes) if rank not in there)
    return ConfigError(
        f"of the {config.nnodes} hosts (nnodes) node_rank {ranks} did not come to {config.master_addr}:"
        f"{config.master_port} (master_addr, master_port) within {config.distributed_timeout_seconds} s; start it "
        "there, or raise distributed_timeout_seconds"
    )


def _options(config: EngineConfig) -> dict[str, Any]:
    """As they arrive: MessagePack knows one kind of list."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    shared = {name: value for name, value in fields.items() if name not in _OWN}
    return msgspec.msgpack.decode(msgspec.msgpack.encode(shared))


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("noria", "jax", "jaxlib")}
