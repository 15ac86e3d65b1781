"""A connection between two hosts: messages in order, each with its length before it, over TCP.

One connection is one life of two processes: when either ends, however that comes, the other finds the connection closed
at once. Beats tell of machines and networks that went away without closing anything.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

from noria.engine.hosts.messages import Beat, Message, decoder, encode
from noria.errors import NoriaError

BEAT_S = 1.0
SILENCE_S = 20.0  # after so much of it a host is gone
STUCK_S = 5.0  # that a call into the device gets to end when a host is gone
NOTICE_S = 2.0  # until a host that is gone, which broke a call into the device, is known to be
GOODBYE_S = 20.0  # that a host gets to end when it is told to
HOST_LOST = 5  # exit status of a process that had to end because another host did
_LENGTH = struct.Struct(">I")
_MOST_BYTES = 1 << 28  # of a message; what is longer comes from somebody who speaks another language


class Link:
    """Several threads may send at a time, one may receive. Errors of a connection are OSErrors."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_S)
        self._socket = connection
        self._decode = decoder()
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(data)

    def beat(self) -> None:
        """Unless something is being sent, which is as good."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.sendall(frame(Beat()))
            finally:
                self._sending.release()

    def receive(self, timeout_s: float = SILENCE_S) -> Message | None:
        """The next message; None when the other side has closed. Raises TimeoutError when nothing comes for so long,
        and msgspec.MsgspecError for what is no message."""
        self._socket.settimeout(timeout_s)
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        [length] = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise ConnectionError("it does not speak as a host of noria's does")
        body = self._read(length)
        return None if body is None else self._decode(body)

    def messages(self) -> Iterator[Message]:
        """Until the other side closes."""
        while (message := self.receive()) is not None:
            yield message

    def has_ended(self) -> bool:
        """Whether the other side has closed, of a link on which nothing is expected."""
        readable, _, _ = select.select([self._socket], [], [], 0)
        try:
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):  # close alone would not wake a thread that receives
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)


def frame(message: Message) -> bytes:
    """For send_frame, where several links are told the same."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


def end_process(error: NoriaError) -> None:
    """At once: for a process whose main thread waits, in a call that nothing can break off, for a host that is gone."""
    print(f"noria: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    os._exit(HOST_LOST)


def bound_the_end(error: NoriaError) -> None:
    """From now on this process ends within STUCK_S of its end's beginning: there JAX waits for a host that is gone."""
    ending = threading.Event()
    atexit.register(ending.set)

    def watch() -> None:
        ending.wait()
        time.sleep(STUCK_S)
        end_process(error)

    threading.Thread(target=watch, name="noria-host-end", daemon=True).start()
