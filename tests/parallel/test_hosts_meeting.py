"""How hosts find each other and what they say, without a device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from noria import EngineConfig, SamplingParams, StructuredOutputsParams, follow
from noria.engine.hosts.link import Link
from noria.engine.hosts.meeting import gather, join
from noria.engine.hosts.messages import (
    Draft,
    Prepare,
    Take,
    decoder,
    encode,
    execute,
    masks_of,
    sample,
    schedule_of,
)
from noria.errors import ConfigError, EngineDeadError, named
from noria.scheduler.schedule import CachedRequest, GrammarMasks, NewRequest, Schedule


@pytest.fixture
def port() -> int:
    """Of which the next one is free, too."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.suppress(OSError, OverflowError):
            found = listener.getsockname()[1]
            with socket.create_server(("127.0.0.1", found + 1)):
                return found
    raise AssertionError("no port is free")


def config(port: int, rank: int, nnodes: int = 3, **options: Any) -> EngineConfig:
    common = {"model": "m", "nnodes": nnodes, "master_port": port, "distributed_timeout_seconds": 2}
    return EngineConfig(**common | options, node_rank=rank)


def meet(*configs: EngineConfig) -> list[Future[Any]]:
    """Of host 0 and of others, when all have ended their search."""
    with ThreadPoolExecutor(len(configs)) as pool, ExitStack() as stack:
        found = [pool.submit(join if each.node_rank else gather, each) for each in configs]
        for future in found:
            if future.exception() is None:
                value = future.result()
                for link in value.values() if isinstance(value, dict) else [value]:
                    stack.callback(link.close)
    return found


def test_hosts_that_find_each_other(port: int) -> None:
    lead, *others = meet(config(port, 0), config(port, 2, model="elsewhere"), config(port, 1))
    assert set(lead.result()) == {1, 2}
    assert all(other.exception() is None for other in others)


def test_a_missing_host_is_an_error_everywhere_in_time(port: int) -> None:
    begin = time.monotonic()
    lead, other = meet(config(port, 0), config(port, 1))
    assert time.monotonic() - begin < 6
    for each in (lead, other):
        with pytest.raises(ConfigError, match=r"of the 3 hosts \(nnodes\) node_rank 2 did not come to .*master_addr"):
            each.result()


def test_no_host_0(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"host 0 was not found at 127.0.0.1:{port} within 1 s .*master_port"):
        join(config(port, 1, distributed_timeout_seconds=1))


def test_a_host_that_still_looks_for_host_0_ends_at_once(port: int) -> None:
    """It is host 0 that has requests to finish, and there is none."""
    sizes = {"tensor_parallel_size": 3, "distributed_timeout_seconds": 60}
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        follow(config(port, 1, **sizes), patient=True)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"max_num_seqs": 4}], r"max_num_seqs is None on host 0 and 4 on host 1; it must be the same on all"),
        ([{"device_order": (1, 0)}], r"device_order is \[\] on host 0 and \[1, 0\] on host 1"),
    ],
)
def test_hosts_with_other_options(port: int, others: list[dict[str, Any]], message: str) -> None:
    found = meet(config(port, 0, nnodes=2), *(config(port, 1, nnodes=2, **each) for each in others))
    for each in found:
        with pytest.raises(ConfigError, match=message):
            each.result()


def test_a_rank_that_is_there_twice(port: int) -> None:
    found = meet(config(port, 0), config(port, 1), config(port, 1))
    errors = sorted(str(each.exception()) for each in found)
    assert "node_rank 1 is taken" in errors[0]
    assert all("node_rank 2 did not come" in error for error in errors[1:])


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_that_is_taken_is_an_error_at_once(port: int, taken: int) -> None:
    """The second is JAX's, which would end the process without a word."""
    begin = time.monotonic()
    message = rf"host 0 cannot listen at 127.0.0.1:{port + taken}: .* master_port and the port after it free"
    with socket.create_server(("127.0.0.1", port + taken)), pytest.raises(ConfigError, match=message):
        gather(config(port, 0, distributed_timeout_seconds=60))
    assert time.monotonic() - begin < 10


def test_who_is_no_host_is_not_listened_to(port: int) -> None:
    def ask() -> bytes:
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return stranger.recv(1)
            except ConnectionRefusedError:  # nobody listens yet
                time.sleep(0.05)
        raise AssertionError("host 0 never listened")

    two = {"nnodes": 2, "distributed_timeout_seconds": 30}
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        lead = pool.submit(gather, config(port, 0, **two))
        assert ask() == b""
        other = pool.submit(join, config(port, 1, **two))
        for link in (*lead.result().values(), other.result()):
            stack.callback(link.close)
        assert set(lead.result()) == {1}
        assert isinstance(other.result(), Link)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_rank": 1}, r"node_rank must be 0 to nnodes - 1 \(0\), not 1"),
        ({"nnodes": 2, "node_rank": -1}, "node_rank must be 0 to nnodes - 1"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"master_port": 65535}, "master_port must be 1 to 65534"),
        ({"master_addr": ""}, "master_addr must be the address"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds must be at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


def test_what_is_said_arrives() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=["a"],
        logit_bias={3: 1.5},
        bad_words=["b"],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    new = NewRequest("1", [1, 2, 3], params, frozenset((2, 9)), -(2**63), 3, 2, ([4, 5], [6]), ((7, 8), (9,)))
    cached = (CachedRequest("2", 7, ([1], [])), CachedRequest("0", 3, ([1], [2]), True, [5, 6]))
    scheduled = {"2": 1, "1": 1, "0": 4}
    schedule = Schedule((new,), cached, scheduled, 2, {"0": [5, 6]}, ("3",), ("4", "5"))
    arrived = schedule_of(decoder()(encode(execute(schedule))))  # type: ignore[arg-type]
    assert arrived == schedule
    assert list(arrived.num_scheduled_tokens) == list(scheduled)  # the order is that of the batch
    assert dataclasses.asdict(arrived.new_requests[0].sampling_params) == dataclasses.asdict(params)
    masks = GrammarMasks(("1", "2"), np.array([[1, -1, 3], [4, 5, -6]], np.int32))
    back = masks_of(decoder()(encode(sample(masks))))  # type: ignore[arg-type]
    assert back is not None
    assert back.request_ids == masks.request_ids
    assert np.array_equal(back.bitmask, masks.bitmask)
    assert masks_of(decoder()(encode(sample(None)))) is None  # type: ignore[arg-type]


def test_which_runner_is_meant_arrives() -> None:
    back = lambda message: decoder()(encode(message))
    masks = GrammarMasks(("1",), np.zeros((1, 2), np.int32))
    for is_draft in (True, False):
        said = (
            execute(Schedule(), is_draft=is_draft),
            sample(None, is_draft=is_draft),
            sample(masks, is_draft=is_draft),
            Take(is_draft),
            Prepare(7, is_draft),
        )
        assert [back(message).is_draft for message in said] == [is_draft] * len(said)  # type: ignore[union-attr]
    wanted = {"1": (3, ([4, 5], [6])), "0": (1, ([], []))}
    drafts = back(Draft(wanted))
    assert isinstance(drafts, Draft)
    assert list(drafts.wanted.items()) == list(wanted.items())  # the order is that of the batch


def test_errors_by_name() -> None:
    assert type(named("ConfigError", "x")) is ConfigError
    assert type(named("KeyError", "x")) is EngineDeadError
    assert type(named("named", "x")) is EngineDeadError
