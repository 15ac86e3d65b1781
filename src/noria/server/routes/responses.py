"""/v1/responses: conversations are answered with typed items, and kept so that they can be gone on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from noria.errors import RequestError
from noria.server.conversation import prepare_chat
from noria.server.errors import ApiError, json_response
from noria.server.ids import new_id
from noria.server.openapi import takes
from noria.server.requests import body_of
from noria.server.responses import background
from noria.server.responses.conversation import as_chat, in_own_terms
from noria.server.responses.output import Event
from noria.server.responses.store import Record, size_of
from noria.server.responses.writer import ResponseWriter, begun
from noria.server.schema.responses import ResponseBody
from noria.server.sse import EventStream, answer, named_event
from noria.server.state import ServerState, State


def response_routes() -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=takes(ResponseBody))
    async def create(
        request: Request, state: State, body: Annotated[ResponseBody, Depends(body_of(ResponseBody))]
    ) -> Response:
        store = _is_stored(state, body)
        writer, record = await _prepare(state, body, store=store)
        if body.background:
            background.begin(state, record, writer, keep_events=bool(body.stream))
            return EventStream(record.follow(0), last=b"") if body.stream else json_response(record.response)
        events = _attended(state, record, writer, store=store)
        if body.stream:
            return EventStream(_encoded(events), last=b"")
        return json_response(await answer(request, _whole(events, record, writer)))

    return router


def _is_stored(state: ServerState, body: ResponseBody) -> bool:
    """Raises RequestError when a response would have to be kept, and cannot be."""
    if state.responses.is_open:
        return body.store is not False
    for name, value in (("store", body.store), ("background", body.background)):
        if value:
            raise RequestError(f"{name} needs a server that was started with --response-store-bytes; leave it out")
    return False


async def _prepare(state: ServerState, body: ResponseBody, *, store: bool) -> tuple[ResponseWriter, Record]:
    model = state.check_model(body.model)
    previous = None if body.previous_response_id is None else _previous(state, body.previous_response_id)
    context, size = tuple(body.input), size_of(body.input)
    if previous is not None:
        context, size = (*previous.conversation, *context), previous.conversation_size + size
    response_id = new_id("resp", "_")
    with in_own_terms():
        job = await prepare_chat(state, response_id, as_chat(body, context))
    record = Record(begun(response_id, body, model, store=store), context, size)
    return ResponseWriter(state, job, body, record), record


def _previous(state: ServerState, response_id: str) -> Record:
    try:
        record = state.responses.get(response_id)
    except ApiError as error:
        raise ApiError(404, error.message, param="previous_response_id", code="previous_response_not_found") from None
    if record.is_running:
        raise ApiError(400, f"the response {response_id} still runs; wait for its end", param="previous_response_id")
    return record


async def _attended(
    state: ServerState, record: Record, writer: ResponseWriter, *, store: bool
) -> AsyncGenerator[Event]:
    """The events, as long as there is somebody to read them; a response that nobody waited for is not kept."""
    if store:
        state.responses.add(record)
    try:
        async with aclosing(writer.events()) as events:
            async for each in events:
                yield each
    finally:
        if record.is_running:
            state.responses.remove(record)


async def _encoded(events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for each in events:
            yield named_event(each)


async def _whole(events: AsyncGenerator[Event], record: Record, writer: ResponseWriter) -> dict[str, Any]:
    """Raises ApiError when the response failed: its sender learns it by the status."""
    async with aclosing(events):
        async for _ in events:
            pass
    if writer.error is not None:
        raise writer.error
    return record.response
