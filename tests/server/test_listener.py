"""The socket that a server listens at."""

from __future__ import annotations

import socket

import pytest

from noria.errors import NoriaError
from noria.server.lifecycle import _listen


def test_small_parts_of_a_stream_are_sent_at_once() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_cannot_be_had_names_the_option_that_is_wrong() -> None:
    with _listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(NoriaError, match=rf"cannot listen at 127.0.0.1:{port}: [^(]*; choose another --port"):
            _listen("127.0.0.1", port)
    for host in ("192.0.2.1", "no host.invalid"):  # of nobody's network; no name
        with pytest.raises(NoriaError, match=r"[^(]*; choose another --host"):
            _listen(host, 0)
