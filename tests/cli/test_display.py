"""Progress on stderr: a bar on a terminal, one line anywhere else, nothing when there is nothing to fetch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from noria.cli import display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_of_programs_or_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with display.progress_bar("compiling") as show:
        show(3, 7)
    assert "3/7" in terminal.getvalue()
    with display.progress_bar("loading weights") as show:
        show(3_000_000, 7_000_000)
    assert "3.0/7.0 MB" in terminal.getvalue()


def test_anything_else_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress_bar("compiling") as show:
        show(1, 2)
        show(2, 2)
    assert capsys.readouterr() == ("", "compiling\n")


@pytest.mark.parametrize(("fetched", "shown"), [(0, ""), (3, "fetching tiny\n")])
def test_fetching_is_shown_only_when_it_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fetched: int, shown: str
) -> None:
    def pull(name: str, revision: str | None, cache: Path, progress: Callable[[int, int], None]) -> Path:
        for done in range(fetched):
            progress(done, fetched)
        return cache / name

    monkeypatch.setattr("noria.weights.hub.pull", pull)
    monkeypatch.setenv("NORIA_HOME", "models-are-here")
    assert display.fetch("tiny", None) == Path("models-are-here/tiny")
    assert capsys.readouterr() == ("", shown)
