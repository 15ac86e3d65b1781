"""Responses that are kept: to be asked for, cancelled, and gone on from. In memory, so they end with the server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from noria.server.errors import ApiError
from noria.server.schema.items import Item


@dataclass(slots=True, eq=False)
class Record:
    """One response and what it answers."""

    response: dict[str, Any]
    context: tuple[
        Item, ...
    ]  # the conversation up to its output: the items before share them, whatever happens to those
    context_size: int  # bytes
    task: asyncio.Task[None] | None = None  # of a response in the background
    events: list[bytes] | None = None  # of a streamed one in the background, for clients that come (back) later
    size: int = 0  # bytes it counts in the store
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def is_running(self) -> bool:
        return self.response["status"] == "in_progress"

    @property
    def conversation(self) -> tuple[Item, ...]:
        """For the response that goes on from here."""
        return (*self.context, *self.response["output"])

    @property
    def conversation_size(self) -> int:
        return self.context_size + size_of(self.response["output"])

    def tell(self) -> None:
        """There are events, or the response is over."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, begin: int) -> AsyncGenerator[bytes]:
        """The events from number `begin` on, until the response is over."""
        assert self.events is not None
        while True:
            news = self._news
            while begin < len(self.events):
                yield self.events[begin]
                begin += 1
            if not self.is_running:
                return
            await news.wait()


def size_of(content: Any) -> int:
    """Bytes of its JSON."""
    return len(msgspec.json.encode(content))


class ResponseStore:
    """The responses that were used last, as many as fit; those that run have their place whatever they need."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of the JSON of responses and their input; 0 keeps none."""
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()  # by id, the last used one at the end
        self._num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._records)

    def get(self, response_id: str) -> Record:
        """Raises ApiError 404."""
        record = self._records.get(response_id)
        if record is None:
            raise ApiError(
                404, f"there is no response {response_id!r:.80} here; it may have been dropped for newer ones"
            )
        self._records.move_to_end(response_id)
        return record

    def add(self, record: Record) -> None:
        self._records[record.id] = record
        self.settle(record)

    def remove(self, record: Record) -> None:
        """Ignores one that is not here."""
        if self._records.get(record.id) is record:
            del self._records[record.id]
            self._num_bytes -= record.size

    def settle(self, record: Record) -> None:
        """Counts a record anew, and drops what was not used for the longest time until all fits."""
        if self._records.get(record.id) is not record:
            return
        own = size_of(record.response) + sum(map(len, record.events or ()))
        self._num_bytes += record.context_size + own - record.size
        record.size = record.context_size + own
        if record.size > self._max_bytes and not record.is_running:
            self.remove(record)  # rather than all others
        while self._num_bytes > self._max_bytes:
            oldest = next((each for each in self._records.values() if not each.is_running), None)
            if oldest is None:
                return
            self.remove(oldest)
