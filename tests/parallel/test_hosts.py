"""Several hosts as one program: processes with a CPU device each, which find each other on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from drafting import NARROW, make_head, narrow_model, with_drafts
from shards_worker import engine_options
from test_data_parallel import check
from test_tensor_parallel import check_equal

from noria import LLM

WORKER = Path(__file__).with_name("hosts_worker.py")
ONE_DEVICE = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
SMALL_POOL = {"num_blocks_override": 24}  # so that requests are preempted
ENDS_WITHIN_S = 40  # of a host that is gone: what a silence, a stuck call and the end of a process may take


def free_port() -> int:
    """Of which the next one is free, too."""
    for port in range(20000 + os.getpid() % 9000, 60000, 2):
        with ExitStack() as stack:
            try:
                for each in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


class Host:
    """A process, and what it says."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], env={**os.environ, **ONE_DEVICE}, stdout=subprocess.PIPE, stderr=file
            )

    def line(self) -> Any:
        """The next one of stdout, as JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended:\n{self.log.read_text()}") from None

    def says(self, pattern: str, timeout_s: float = 120) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Workers:
    """hosts_worker.py on so many hosts."""

    def __init__(self, stack: ExitStack, count: int, job: dict[str, Any], folder: Path) -> None:
        shared = {"nnodes": count, "tensor_parallel_size": count, "master_port": free_port()}
        self.hosts = []
        for rank in range(count):
            options = SMALL_POOL | shared | {"node_rank": rank, "distributed_timeout_seconds": 60}
            options |= job.get("options", {})
            command = [str(WORKER), json.dumps({"goes_on": False, **job, "options": options})]
            self.hosts.append(stack.enter_context(Host(command, folder / f"host {rank}")))


def alone(job: dict[str, Any]) -> dict[str, Any]:
    """The answers of one host, in this process."""
    from hosts_worker import answers

    with LLM(**engine_options(job) | SMALL_POOL) as llm:
        found = answers(llm, job["speaks"])
        assert llm.stats.scheduler.num_preemptions > 0
    return json.loads(json.dumps(found))


@pytest.mark.slow
def test_two_hosts_answer_like_one_and_end_together(
    tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path
) -> None:
    job = {"model": str(tiny_text_model), "speaks": True, "compile_cache_dir": compile_cache_dir, "goes_on": True}
    with ExitStack() as stack:
        lead, follower = Workers(stack, 2, job, tmp_path).hosts
        expected = alone(job)
        found = lead.line()
        assert found["preemptions"] > 0
        check_equal({"one": expected, "two": found["answers"]})
        follower.process.kill()
        begin = time.monotonic()
        assert lead.wait(ENDS_WITHIN_S) == 1
        assert time.monotonic() - begin < ENDS_WITHIN_S
        assert "EngineDeadError: host 1 is gone" in lead.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_that_draft(
    tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path, method: str, hosts: int
) -> None:
    """Answers are those of one host without drafts. What drafts divides by two hosts, and not by four."""
    narrow = {"draft_model": narrow_model, "eagle3": partial(make_head, **NARROW)}[method]
    drafts = with_drafts(method, narrow(tiny_text_model, tmp_path / "narrow"))
    job = {"model": str(tiny_text_model), "speaks": True, "compile_cache_dir": compile_cache_dir}
    with ExitStack() as stack:
        workers = Workers(stack, hosts, {**job, "options": drafts}, tmp_path).hosts
        expected = alone(job)
        found = workers[0].line()
        check({"one": expected, "several": found["answers"]})
        assert found["accepted"] > 0
        assert found["preemptions"] > 0
        assert [worker.wait(60) for worker in workers] == [0] * hosts
        for worker in workers:
            assert "Traceback" not in worker.log.read_text()


@pytest.mark.slow
def test_four_hosts_answer_like_one_and_leave_in_order(
    tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path
) -> None:
    job = {"model": str(tiny_text_model), "speaks": True, "compile_cache_dir": compile_cache_dir}
    with ExitStack() as stack:
        workers = Workers(stack, 4, job, tmp_path).hosts
        expected = alone(job)
        check_equal({"one": expected, "four": workers[0].line()["answers"]})
        assert [worker.wait(60) for worker in workers] == [0, 0, 0, 0]
        for worker in workers:
            assert "Traceback" not in worker.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_freezes_ends_the_others(
    tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    job = {"model": str(tiny_text_model), "speaks": True, "compile_cache_dir": compile_cache_dir, "goes_on": True}
    with ExitStack() as stack:
        workers = Workers(stack, 4, job, tmp_path).hosts
        workers[0].line()
        workers[victim].process.send_signal(number)
        others = [worker for rank, worker in enumerate(workers) if rank != victim]
        assert all(worker.wait(ENDS_WITHIN_S) for worker in others)
        if victim:
            assert f"host {victim} is gone" in workers[0].log.read_text()


def serve(model: Path, cache: str, port: int, rank: int, *more: str) -> list[str]:
    sizes = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--dtype", "float32"]
    hosts = ["--nnodes", "2", "--node-rank", str(rank), "--master-port", str(port), "--tensor-parallel-size", "2"]
    pool = ["--num-blocks-override", "129", "--compile-cache-dir", cache, "--distributed-timeout-seconds", "60"]
    return ["-m", "noria", "serve", str(model), "--port", "0", *sizes, *hosts, *pool, *more]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["in order", "by the death of one"])
def test_two_hosts_serve(tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path, end: str) -> None:
    port = free_port()
    with ExitStack() as stack:
        lead, follower = (
            stack.enter_context(
                Host(
                    serve(tiny_text_model, compile_cache_dir, port, rank, "--on-engine-death", "exit"),
                    tmp_path / f"host {rank}",
                )
            )
            for rank in range(2)
        )
        url = lead.says(r" at (http://\S+)")[1]
        follower.says("host 1 follows")
        lead.says("programs ready")
        body = {"prompt": "the water", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        if end == "in order":
            follower.process.send_signal(signal.SIGTERM)  # which reaches all of them where all are to end
            follower.says("host 0 ends this host")
            assert (
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"] == answer.json()["choices"]
            )
            lead.process.send_signal(signal.SIGTERM)
            assert (lead.wait(60), follower.wait(60)) == (0, 0)
        else:
            follower.process.kill()
            assert lead.wait(ENDS_WITHIN_S) == 1
            assert lead.log.read_text().splitlines()[-1].startswith("noria: error: host 1 is gone")
