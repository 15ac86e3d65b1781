"""The socket that a server listens at."""

from __future__ import annotations

import socket

from noria.server.lifecycle import _listen


def test_small_parts_of_a_stream_are_sent_at_once() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
