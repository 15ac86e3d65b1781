"""A real server: `noria serve` in a process, and what tests ask of it from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import openai


def small_options(compile_cache_dir: str) -> list[str]:
    """Of an engine that starts quickly: 8 seats, 256 tokens, blocks for 8 requests of full length."""
    sizes = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--block-size", "16"]
    pool = ["--num-blocks-override", "129", "--strict-compile", "--dtype", "float32"]
    return [*sizes, *pool, "--compile-cache-dir", compile_cache_dir]


class ServerProcess:
    def __init__(self, model: Path, log: Path, *options: str) -> None:
        self.log = log
        self._file = log.open("wb")
        command = [sys.executable, "-m", "noria", "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=self._file, stdout=self._file, stdin=subprocess.DEVNULL)
        self.key = options[options.index("--api-key") + 1] if "--api-key" in options else "none"
        self._url: str | None = None

    @property
    def url(self) -> str:
        if self._url is None:
            found = wait_for(lambda: re.search(r" at (http://\S+)", self.log.read_text()), 60, self._is_running)
            self._url = found[1]
        return self._url

    @property
    def engine_pid(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def get(self, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.get(self.url + path, headers=headers, timeout=30, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        return httpx.post(self.url + path, headers=headers, timeout=60, **options)

    def client(self) -> openai.OpenAI:
        http = httpx.Client(verify=False)  # whose certificates would take longer to load than many a test
        return openai.OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=60, http_client=http)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=60)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get("/ready").status_code == 200
        return False

    def wait_ready(self) -> None:
        wait_for(self.is_ready, 240, self._is_running)

    def metric(self, name: str) -> float:
        """The sum over all labels; 0 when there is none yet."""
        rows = re.findall(rf"^noria:{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, rows))

    def wait_idle(self) -> None:
        """Nothing runs or waits, and no block of the cache is in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: not any(self.metric(name) for name in names), 20)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._file.close()

    def _is_running(self) -> None:
        assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"


def wait_for(
    condition: Callable[[], Any], timeout_s: float, check: Callable[[], None] = lambda: None, pause_s: float = 0.05
) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        check()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(pause_s)
    return value


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
