"""Server-sent events out of the bytes of a stream, however they are cut.

After the WHATWG HTML standard, section 9.2.6, of which a client of OpenAI's API needs the data alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from noria.errors import NoriaError

_LONGEST_LINE = 64 << 20  # bytes; what is longer is no stream of tokens


class EventParser:
    """Fed with bytes as they come; yields the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line whose end has not come
        self._data: list[bytes] = []  # of an event whose end has not come
        self._after_return = False  # the last byte was a CR, so an LF that follows is no line of its own

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Raises NoriaError when a line never ends."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_return = chunk.endswith(b"\r") if chunk else self._after_return
        self._rest += chunk
        if len(self._rest) > _LONGEST_LINE:
            raise NoriaError("a line of the stream has no end")
        if b"\n" not in chunk and b"\r" not in chunk:
            return
        *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                data, self._data = b"\n".join(self._data), []
                yield data

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":  # other fields and comments (no name) say nothing here
            self._data.append(value.removeprefix(b" "))
