"""/v1/responses/{id}: what is kept of responses: shown, followed, cancelled, forgotten."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from noria.server.errors import ApiError, json_response
from noria.server.responses import background
from noria.server.responses.store import Record
from noria.server.schema.items import Item
from noria.server.sse import EventStream
from noria.server.state import State

_PATH = "/v1/responses/{response_id}"
_MAX_ITEMS = 100
_NUM_ITEMS = 20


def stored_response_routes() -> APIRouter:
    router = APIRouter()

    @router.get(_PATH)
    async def retrieve(request: Request, state: State, response_id: str) -> Response:
        query = _query(request, ("stream", "starting_after", "include_obfuscation"))
        record = state.responses.get(response_id)
        _flag(query, "include_obfuscation", only=False)
        if _flag(query, "stream"):
            return EventStream(_followable(record).follow(_number(query, "starting_after", -1, -1) + 1), last=b"")
        if "starting_after" in query:
            raise ApiError(400, "starting_after is for streams; set stream, or leave it out", param="starting_after")
        return json_response(record.response)

    @router.delete(_PATH)
    async def delete(request: Request, state: State, response_id: str) -> Response:
        """One that runs in the background is cancelled."""
        _query(request, ())
        record = state.responses.get(response_id)
        state.responses.remove(record)
        await background.cancel(record)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(_PATH + "/cancel")
    async def cancel(request: Request, state: State, response_id: str) -> Response:
        """One that is over stays as it is."""
        _query(request, ())
        record = state.responses.get(response_id)
        if record.task is None:
            raise ApiError(400, f"the response {response_id} was not made with background; close its stream instead")
        await background.cancel(record)
        return json_response(record.response)

    @router.get(_PATH + "/input_items")
    async def input_items(request: Request, state: State, response_id: str) -> Response:
        query = _query(request, ("after", "limit", "order"))
        record = state.responses.get(response_id)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be asc or desc, not {order!r:.80}", param="order")
        items = record.context if order == "asc" else record.context[::-1]
        return json_response(_page(items, query.get("after"), _number(query, "limit", _NUM_ITEMS, 1, _MAX_ITEMS)))

    return router


def _page(items: tuple[Item, ...], after: str | None, limit: int) -> dict[str, Any]:
    """The next items of the conversation that was answered, with those of the responses before."""
    begin = 0
    if after is not None:
        begin = next((index for index, item in enumerate(items, 1) if item["id"] == after), -1)
        if begin < 0:
            raise ApiError(400, f"after: there is no item {after!r:.80} in this input", param="after")
    page = items[begin : begin + limit]
    ids = [item["id"] for item in page] or [None]
    more = begin + limit < len(items)
    return {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def _followable(record: Record) -> Record:
    if record.events is None:
        raise ApiError(
            400, f"the response {record.id} was not made with background and stream; leave stream out", param="stream"
        )
    return record


def _query(request: Request, known: Collection[str]) -> Mapping[str, str]:
    for name in request.query_params:
        if name not in known:
            raise ApiError(400, f"{name:.80} is not supported here; leave it out", param=name)
    return request.query_params


def _flag(query: Mapping[str, str], name: str, *, only: bool | None = None) -> bool:
    """only: the one value that is supported."""
    value = {"true": True, "false": False}.get(query.get(name, "false"))
    if value is None:
        raise ApiError(400, f"{name} must be true or false, not {query[name]!r:.80}", param=name)
    if only is not None and name in query and value is not only:
        raise ApiError(400, f"{name} is not supported; leave it out", param=name)
    return value


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int | None = None) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise ApiError(400, f"{name} must be a number, {limits}, not {text!r:.80}", param=name)
    return value
