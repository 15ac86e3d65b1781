"""What the commands show beside the answer, all of it on stderr: progress and statistics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from noria.config import cache_home


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A stage of the start: a bar on a terminal, one plain line anywhere else."""
    if not sys.stderr.isatty():
        note(description)
        yield lambda done, total: None
        return
    amount = MofNCompleteColumn() if description == "compiling" else DownloadColumn()
    with _bar(description, amount) as update:
        yield update


@contextmanager
def counting_bar(description: str, *, stays: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Things that are done one by one: a bar on a terminal, nothing anywhere else. stays: when all is done."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _bar(description, MofNCompleteColumn(), TimeRemainingColumn(), stays=stays) as update:
        yield update


@contextmanager
def _bar(description: str, *more: ProgressColumn, stays: bool = False) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), *more, TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=not stays, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def fetch(model: str, revision: str | None) -> Path:
    """Where the model lies on this machine; shows progress only when it has to be fetched. Raises WeightsError."""
    from noria.weights.hub import pull  # not every command has a model to fetch

    show: Callable[[int, int], None] | None = None
    with ExitStack() as stack:

        def progress(done: int, total: int) -> None:
            nonlocal show
            show = show or stack.enter_context(progress_bar(f"fetching {model}"))
            show(done, total)

        return pull(model, revision, cache_home(), progress)


def statistics(stats: dict[str, Any], usage: dict[str, int]) -> str:
    """One line for people; `stats` as in the output of `noria run --json`."""
    cached = f", {usage['cached_tokens']} of them cached" if usage["cached_tokens"] else ""
    rate = lambda name: f"{stats[name]:,.1f} tokens/s" if stats[name] else "too short to measure"
    return (
        f"prompt {usage['prompt_tokens']} tokens{cached} ({rate('prefill_tok_s')}), "
        f"answer {usage['completion_tokens']} tokens ({rate('decode_tok_s')}), "
        f"first token after {stats['time_to_first_token_s']:.2f} s, "
        f"host share {100 * stats['host_share']:.1f}%, compiles_after_warmup {stats['compiles_after_warmup']}"
    )
