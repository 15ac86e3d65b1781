"""The engine's process as its parent sees it: started, spoken to, waited for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from noria.engine.hosts.link import HOST_LOST
from noria.engine.messages import Codec, FromEngine, Start, Stop, ToEngine

_MODULE = "noria.engine.process"


class EngineProcess:
    """Made by `spawn`. Belongs to the event loop that made it; `end` must be awaited, whatever happened before."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        folder: str,
    ) -> None:
        self._process = process
        self._context = context
        self._socket = socket
        self._folder = folder
        self._codec = Codec()

    @classmethod
    async def spawn(cls, order: Start) -> Self:
        """Raises OSError when no process can be started."""
        # The folder is this user's alone, so nobody else can take the engine's place.
        folder = tempfile.mkdtemp(prefix="noria-")
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.linger = 0
            address = f"ipc://{Path(folder) / 'engine'}"
            socket.bind(address)
            # -P: what lies in the working directory is no part of the engine.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE, address),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self = cls(process, context, socket, folder)
        self.send(order)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Never waits. What is sent to a process that has ended is lost."""
        self._socket.send(self._codec.encode(message))

    async def receive(self) -> FromEngine:
        """The next message. Raises msgspec.MsgspecError for what is none."""
        return self._codec.decode_from_engine(await self._socket.recv())

    async def wait(self) -> str:
        """Returns when the process has ended: how, for people."""
        code = await self._process.wait()
        if code == HOST_LOST:
            return "ended because another host is gone; its log says which"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    async def end(self, grace_s: float) -> None:
        """Asks the process to stop, then makes it; releases everything. Returns when it is gone.

        grace_s: that it gets to stop by itself.
        """
        try:
            if self._process.returncode is None:
                self.send(Stop())
                try:
                    await asyncio.wait_for(self._process.wait(), grace_s)
                except TimeoutError:
                    self.kill()
                    await self._process.wait()
        finally:
            self.kill()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()
