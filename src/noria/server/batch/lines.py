"""The lines of OpenAI's batch format: requests to read, results to write."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BOM = b"\xef\xbb\xbf"


class _Key(msgspec.Struct):
    custom_id: Any = None


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None  # its answer would be lost with the engine


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # what /v1/responses calls them
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Wrong(Exception):
    """What is wrong with a line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request. custom_id: None when the line has none. body: the JSON as it stands in the file. error: why it
    cannot be asked, "" when it can."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: str = ""

    @property
    def key(self) -> str:
        """What its result is known by when the work goes on later."""
        return _line_id(self.number) if self.custom_id is None else f"custom_id {self.custom_id}"

    @property
    def result_id(self) -> str:
        return _line_id(self.number) if self.custom_id is None else f"batch_req_{uuid.uuid4().hex}"


def _line_id(number: int) -> str:
    return f"batch_req_line_{number}"


def custom_id_of(number: int, raw: bytes) -> str | None:
    """None when there is none: the line is no JSON object, or its custom_id no string."""
    try:
        found = msgspec.json.decode(_without_bom(number, raw), type=_Key).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


def parse(number: int, raw: bytes) -> Line:
    """number: of the line in its file, from 1."""
    custom_id = custom_id_of(number, raw)
    try:
        request = msgspec.json.decode(_without_bom(number, raw), type=_Request)
        body = bytes(request.body)
        asked = msgspec.json.decode(body, type=_Body)
        if not request.custom_id:
            raise _Wrong("custom_id must not be empty")
        if request.method != "POST":
            raise _Wrong(f"method must be POST, not {request.method!r}")
        if request.url not in URLS:
            raise _Wrong(f"url must be {' or '.join(URLS)}, not {request.url!r}")
        for name in _Body.__struct_fields__:
            if getattr(asked, name):
                raise _Wrong(f"body: {name} does not work in a batch; leave it out")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _Wrong) as error:
        return Line(number, custom_id, error=f"line {number}: {error}")
    return Line(number, custom_id, request.url, body)


def _without_bom(number: int, raw: bytes) -> bytes:
    return raw.removeprefix(_BOM) if number == 1 else raw


def result(line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer. body: JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encoded(line, response=response, error=None)


def refusal(line: Line) -> bytes:
    """The line of a request that could not be asked."""
    return _encoded(line, response=None, error={"code": "invalid_line", "message": line.error})


def _encoded(line: Line, **rest: Any) -> bytes:
    return msgspec.json.encode({"id": line.result_id, "custom_id": line.custom_id, **rest}) + b"\n"


def read_result(raw: bytes) -> tuple[str, bool]:
    """The key of the line that a result belongs to, and whether it was answered.

    Raises msgspec.MsgspecError, or UnicodeDecodeError, for what is no result.
    """
    found = msgspec.json.decode(raw, type=_Result)
    key = found.id if found.custom_id is None else f"custom_id {found.custom_id}"
    return key, found.response is not None and found.response.status_code == 200


def tokens_of(body: bytes) -> tuple[int, int]:
    """Of the prompts and of the answers."""
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    return usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens
