"""The two files of a batch. Both are streamed: nothing but the custom_ids of all lines is kept in memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from noria.errors import NoriaError
from noria.server.batch.lines import Line, custom_id_of, parse, read_result


@dataclass(frozen=True)
class Input:
    """A file that was looked through. keys: of its lines, see Line.key."""

    path: Path
    keys: frozenset[str]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises NoriaError when it cannot be read, and when two lines have one custom_id."""
        keys = set[str]()
        for number, raw in _lines(path):
            key = Line(number, custom_id_of(number, raw)).key
            if key in keys:
                first = next(n for n, other in _lines(path) if Line(n, custom_id_of(n, other)).key == key)
                raise NoriaError(
                    f"{path} line {number} has the custom_id of line {first}; every line needs one of its own"
                )
            keys.add(key)
        return cls(path, frozenset(keys))

    def lines(self, done: frozenset[str]) -> Iterator[Line]:
        """Those that are left to do."""
        for number, raw in _lines(self.path):
            if Line(number, custom_id_of(number, raw)).key not in done:
                yield parse(number, raw)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1; blank ones are left out."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise NoriaError(f"{path} cannot be read: {error.strerror or error}") from None


class Output:
    """Results, a line each, written out one by one, so that the work can go on after whatever ended it.

    done: keys of the lines that have a result already. num_failed: results that are no answer.
    """

    def __init__(self, path: Path, source: Input) -> None:
        """Looks through what is there, and drops a last line that was not written to its end.

        Raises NoriaError when the file is not that of `source`, or when another process writes it.
        """
        if path.exists() and path.samefile(source.path):
            raise NoriaError(f"{path} is the input; name another file for the results")
        self._path = path
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise NoriaError(f"{path} cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.num_failed = 0
            self.done = frozenset(self._read(path, source))
        except BlockingIOError:
            self._file.close()
            raise NoriaError(f"another process writes {path}; wait for its end") from None
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path, source: Input) -> Iterator[str]:
        whole = 0  # bytes
        wrong: tuple[int, Exception] | None = None
        for number, raw in enumerate(self._file, 1):
            if wrong is not None:
                raise NoriaError(f"{path} line {wrong[0]} is no result of a batch ({wrong[1]}); name another file")
            try:
                if not raw.endswith(b"\n"):
                    break
                key, answered = read_result(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                wrong = number, error
                continue
            if key not in source.keys:
                raise NoriaError(f"{path} line {number} is the result of no line of {source.path}; name another file")
            whole += len(raw)
            self.num_failed += not answered
            yield key
        self._file.seek(whole)
        self._file.truncate()

    def write(self, line: bytes) -> None:
        """A whole line. It is in the file, as far as other processes can see, when this returns.

        Raises NoriaError when it cannot be written, as on a full disk.
        """
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise NoriaError(f"{self._path} cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error there may be a part of a line that cannot be written, which has been said then.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self._file.close()
