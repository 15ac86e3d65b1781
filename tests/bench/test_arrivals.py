"""When requests are sent, and how many at a time."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import statistics

import pytest

from noria.bench.load import Load, arrivals, run
from noria.bench.records import Question, Record

QUESTIONS = [Question([index], 1) for index in range(30)]


def gaps(burstiness: float, count: int = 4000) -> list[float]:
    times = arrivals(Load(20.0, burstiness), count, random.Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / 20)
    return [after - before for before, after in zip([0.0, *times], times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    found = gaps(burstiness)
    assert statistics.mean(found) == pytest.approx(1 / 20)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape); 1 for a Poisson process.
    assert statistics.pstdev(found) * 20 == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_arrivals_repeat_with_their_seed() -> None:
    assert arrivals(Load(5.0), 9, random.Random(3)) == arrivals(Load(5.0), 9, random.Random(3))
    assert arrivals(Load(5.0), 9, random.Random(3)) != arrivals(Load(5.0), 9, random.Random(4))
    assert arrivals(Load(), 3, random.Random(3)) == [0.0, 0.0, 0.0]


class Server:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0
        self.most = 0

    async def ask(self, question: Question) -> Record:
        self.now += 1
        self.most = max(self.most, self.now)
        record = Record(asyncio.get_running_loop().time(), text=str(question.prompt))
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return record


@pytest.mark.parametrize(("load", "most"), [(Load(), 30), (Load(max_concurrency=4), 4), (Load(max_concurrency=1), 1)])
def test_no_more_at_a_time_than_wanted(load: Load, most: int) -> None:
    server, seen = Server(0.001), list[int]()
    found = asyncio.run(run(server.ask, QUESTIONS, load, random.Random(0), lambda done, total: seen.append(done)))
    assert server.most == most
    assert [record.text for record in found.records] == [str(question.prompt) for question in QUESTIONS]
    assert seen == list(range(1, 31))
    assert found.duration_s > 0.001 * 30 / most
    assert gc.isenabled()


def test_requests_are_sent_when_they_are_due() -> None:
    """Open loop: what was sent before need not be answered."""
    server = Server(0.3)
    found = asyncio.run(run(server.ask, QUESTIONS, Load(request_rate=150.0), random.Random(0)))
    starts = [record.start for record in found.records]
    assert starts == sorted(starts)
    assert 0.1 < starts[-1] - starts[0] < 0.3
    assert server.most == 30
    assert 0 <= found.late_s < 0.2


def test_names_of_loads() -> None:
    loads = (Load(), Load(max_concurrency=8), Load(2.5), Load(2.5, max_concurrency=8))
    assert [str(load) for load in loads] == [
        "all at once",
        "concurrency 8",
        "2.5 requests/s",
        "2.5 requests/s, concurrency at most 8",
    ]
