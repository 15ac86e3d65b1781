"""Who comes first: the order of waiting and running requests, and with it who is preempted first (the last)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Literal

from noria.engine.request import Request

Policy = Literal["fcfs", "priority"]
OrderKey = Callable[[Request], tuple[int, int]]


def order_key(policy: Policy) -> OrderKey:
    """A sort key; the lowest comes first. Ends in the arrival number, which is unique and outlives preemptions.

    fcfs: first come, first served. priority: the lowest Request.priority first, of equals the first come. A running
    request with precedence takes its share of the token budget before the others, and their blocks when it needs them;
    a waiting one displaces nobody.
    """
    if policy == "fcfs":
        return lambda request: (0, request.arrival)
    if policy == "priority":
        return lambda request: (request.priority, request.arrival)
    raise ValueError(f'the scheduling policy must be "fcfs" or "priority", not {policy!r}')


class WaitingQueue:
    """Requests in the order of a policy. A preempted one returns to where its arrival puts it: the front."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[int, int]] = []  # keys; those whose request was removed are skipped when they surface
        self._requests: dict[int, Request] = {}  # arrival -> request

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=self._key))

    def push(self, request: Request) -> None:
        self._requests[request.arrival] = request
        heapq.heappush(self._heap, self._key(request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._requests.get(self._heap[0][-1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        del self._requests[request.arrival]
