"""Server-sent events, however a stream is cut into pieces."""

from __future__ import annotations

import pytest

from noria.bench import events
from noria.bench.events import EventParser
from noria.errors import NoriaError

STREAM = (
    'data: {"a": 1}\n\n: a comment\nevent: x\ndata:two\ndata: lines\n\nid: 3\n\ndata: 水車\n\ndata: [DONE]\n\n'.encode()
)
EVENTS = [b'{"a": 1}', b"two\nlines", "水車".encode(), b"[DONE]"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size(end: bytes, size: int) -> None:
    parser, stream = EventParser(), STREAM.replace(b"\n", end)
    pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_every_cut_in_two() -> None:
    stream = STREAM.replace(b"\n", b"\r\n")
    for cut in range(len(stream) + 1):
        parser = EventParser()
        assert [*parser.feed(stream[:cut]), *parser.feed(b""), *parser.feed(stream[cut:])] == EVENTS


def test_an_event_is_there_as_soon_as_it_is_whole() -> None:
    parser = EventParser()
    assert list(parser.feed(b"data: 1\n")) == []
    assert list(parser.feed(b"\ndata: 2")) == [b"1"]
    assert list(parser.feed(b"\n\n")) == [b"2"]


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LONGEST_LINE", 100)
    parser = EventParser()
    for _ in range(10):
        assert list(parser.feed(b"data: 1234")) == []
    with pytest.raises(NoriaError, match="has no end"):
        list(parser.feed(b"data: 1234"))
