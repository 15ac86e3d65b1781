"""Counting compiles: the proof that nothing compiles while serving."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax.monitoring

_COMPILE = "/jax/core/compile/backend_compile_duration"  # also fires when the persistent cache had the program
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(slots=True)
class CompileCount:
    programs: int = 0  # programs that XLA was asked for
    cache_hits: int = 0  # of those, found in the persistent cache

    @property
    def compiled(self) -> int:
        return self.programs - self.cache_hits


class CompileWatch:
    """Counts the compiles that happen inside `watch()` blocks, in whatever part of JAX they come from.

    Blocks of different threads count together; compiles of threads that are in no block (another engine, the user's own
    programs) do not count.
    """

    def __init__(self) -> None:
        self._counts: dict[int, CompileCount] = {}  # by thread
        self._lock = threading.Lock()

        def on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event == _COMPILE and (count := self._counts.get(threading.get_ident())) is not None:
                with self._lock:
                    count.programs += 1

        def on_event(event: str, **kwargs: str | int) -> None:
            if event == _CACHE_HIT and (count := self._counts.get(threading.get_ident())) is not None:
                with self._lock:
                    count.cache_hits += 1

        self._listeners = (on_duration, on_event)
        jax.monitoring.register_event_duration_secs_listener(on_duration)
        jax.monitoring.register_event_listener(on_event)

    @contextlib.contextmanager
    def watch(self, count: CompileCount) -> Iterator[None]:
        """Adds to `count` what this thread compiles meanwhile."""
        thread = threading.get_ident()
        outer = self._counts.get(thread)
        self._counts[thread] = count
        try:
            yield
        finally:
            if outer is None:
                del self._counts[thread]
            else:
                self._counts[thread] = outer

    def close(self) -> None:
        on_duration, on_event = self._listeners
        with contextlib.suppress(ValueError, AssertionError):  # closed before
            jax.monitoring.unregister_event_duration_listener(on_duration)
            jax.monitoring.unregister_event_listener(on_event)
