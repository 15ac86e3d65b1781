"""When each request of a run is sent, and the run itself."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from noria.bench.records import Question, Record


@dataclass(frozen=True, slots=True)
class Load:
    """request_rate: requests per second, inf for all at once. burstiness: 1 for a Poisson process; less is burstier,
    more is steadier. max_concurrency: requests at a time, the others wait in this client; None for any number.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def __str__(self) -> str:
        if math.isinf(self.request_rate):
            return "all at once" if self.max_concurrency is None else f"concurrency {self.max_concurrency}"
        limit = "" if self.max_concurrency is None else f", concurrency at most {self.max_concurrency}"
        return f"{self.request_rate:g} requests/s{limit}"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a load. cpu_s: of this process. late_s: the most that a request was sent later than planned,
    because this client was busy."""

    load: Load
    records: list[Record]
    duration_s: float
    cpu_s: float
    late_s: float

    @property
    def cpu_share(self) -> float:
        """Of one core. A client near 1 measures itself."""
        return self.cpu_s / self.duration_s if self.duration_s else 0.0


def arrivals(load: Load, count: int, source: random.Random) -> list[float]:
    """Seconds from the beginning to each request.

    The gaps are gamma-distributed with shape `burstiness`, then scaled so that the last request comes at
    count / request_rate: what is offered is the rate that was asked for, whatever was drawn.
    """
    if math.isinf(load.request_rate):
        return [0.0] * count
    times, now = list[float](), 0.0
    for _ in range(count):
        now += source.gammavariate(load.burstiness, 1.0)
        times.append(now)
    scale = count / load.request_rate / now if now else 0.0
    return [scale * each for each in times]


async def run(
    ask: Callable[[Question], Awaitable[Record]],
    questions: Sequence[Question],
    load: Load,
    source: random.Random,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Asks all questions as `load` says. progress: told how many of how many are answered."""
    times = arrivals(load, len(questions), source)
    seats = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    done, late = 0, 0.0

    async def one(question: Question) -> Record:
        nonlocal done
        if seats is None:
            record = await ask(question)
        else:
            async with seats:
                record = await ask(question)
        done += 1
        progress(done, len(questions))
        return record

    with _little_garbage_collection():
        cpu, begin = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = list[asyncio.Task[Record]]()
            for question, planned in zip(questions, times):
                if (wait := begin + planned - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                late = max(late, time.perf_counter() - begin - planned) if planned else late
                tasks.append(group.create_task(one(question)))
        duration, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Run(load, [task.result() for task in tasks], duration, cpu, late)


@contextmanager
def _little_garbage_collection() -> Iterator[None]:
    """A long collection in the middle of a run would look like a pause of the server: what is there already is left
    out of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
