"""Responses that run without a client: begun, followed and cancelled through the store."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from noria.server.responses.store import Record
from noria.server.responses.writer import ResponseWriter
from noria.server.sse import named_event
from noria.server.state import ServerState


def begin(state: ServerState, record: Record, writer: ResponseWriter, *, keep_events: bool) -> None:
    """Runs in a task of its own, for which the server's end waits as for a request."""
    if keep_events:
        record.events = []
    state.responses.add(record)
    state.active += 1
    record.task = asyncio.ensure_future(_run(record, writer))
    record.task.add_done_callback(lambda _: _over(state, record))


async def cancel(record: Record) -> None:
    """Ends one that runs; waits until its work has stopped."""
    if record.task is not None and record.is_running:
        record.task.cancel()
        await asyncio.wait({record.task})


async def _run(record: Record, writer: ResponseWriter) -> None:
    async with aclosing(writer.events()) as events:
        async for each in events:
            if record.events is not None:
                record.events.append(named_event(each))
            record.tell()


def _over(state: ServerState, record: Record) -> None:
    state.active -= 1
    if record.is_running:
        record.response["status"] = "cancelled"
        state.responses.settle(record)
    record.tell()
