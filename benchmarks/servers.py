"""Servers as processes, for the benchmarks that need one: started, watched, measured and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

_POLL_S = 0.05


class Server:
    """A context in which a server runs. url: where it listens, without a path."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        ready_path: str,
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        """ready_path: answered with 200 as soon as requests are taken. log: gets what the server prints."""
        self.url = url
        self._command = command
        self._ready = url + ready_path
        self._log = log
        self._environment = environment
        self._timeout_s = timeout_s
        self.start_s = 0.0  # from the start of the process until it takes requests

    def __enter__(self) -> Self:
        begin = time.perf_counter()
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment,
                start_new_session=True,
            )
        try:
            while not self._is_ready():
                if self.process.poll() is not None or time.perf_counter() - begin > self._timeout_s:
                    raise SystemExit(f"{' '.join(self._command[:4])} ... is not ready:\n{self.tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - begin
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(self._ready, timeout=5).status == 200
        return False

    def tail(self) -> str:
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-20:])

    def rss_mib(self) -> list[float]:
        """Memory that the server and each of its child processes have resident."""
        return [round(memory_kib(pid, "VmRSS") / 1024, 1) for pid in tree(self.process.pid)]

    def peak_mib(self) -> float:
        """The most that they ever had resident, each by itself, added up."""
        return round(sum(memory_kib(pid, "VmHWM") for pid in tree(self.process.pid)) / 1024, 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from tree(int(child))


def memory_kib(pid: int, name: str) -> int:
    """0 for a process that has ended."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found[1])
    return 0
