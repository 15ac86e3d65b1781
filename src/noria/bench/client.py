"""A client of OpenAI's API that notes when each part of an answer arrives.

Whatever a server does ends in a Record: no exception of the network or of a malformed stream gets out of `ask`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx
import msgspec

from noria.bench.events import EventParser
from noria.bench.records import Prompt, Question, Record
from noria.errors import NoriaError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_IDLE_S = 3.0  # a connection that lay idle longer is not used again: the server may be closing it
_DETAIL = 300  # characters of a server's complaint


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Refusal(Exception):
    """kind: what is counted; detail: what is shown of the first of each kind."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL]


class LoadClient:
    """Talks to one server over as many connections as there are requests at a time. Belongs to one event loop."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        keep_text: bool = False,
    ) -> None:
        """model: None for the first that the server names. extra: further fields of every body. timeout_s: for a whole
        answer. keep_text: records hold the answers' texts. Raises NoriaError for a URL that is none.
        """
        self.endpoint = endpoint
        self.model = model
        self._extra = dict(extra or {})
        self._timeout_s = timeout_s
        self._keep_text = keep_text
        self._decode = msgspec.json.Decoder(_Chunk).decode
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        try:
            self._http = httpx.AsyncClient(
                base_url=base_url.rstrip("/").removesuffix("/v1"),
                headers=headers,
                timeout=httpx.Timeout(None, connect=min(60.0, timeout_s)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
                verify=base_url.startswith("https"),  # without need the certificates are not read
                trust_env=False,  # a proxy in between would be measured, too
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise NoriaError(f"--base-url is not a URL ({error}); write it as in http://127.0.0.1:8000") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The model that is asked: the first of /v1/models unless one was named. Raises NoriaError."""
        if self.model is None:
            answer = await self._get("/v1/models")
            try:
                self.model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise NoriaError("the server's /v1/models names no model; name one with --model") from None
        return self.model

    async def get_text(self, path: str) -> str:
        """Raises NoriaError."""
        try:
            response = await self._http.get(path, timeout=30.0)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoriaError(f"cannot reach {self._http.base_url}: {_words(error)}; is the server up?") from None
        if response.status_code != 200:
            raise NoriaError(
                f"GET {path} was answered with status {response.status_code}: {_complaint(response.content)}"
            )
        return response.text

    async def _get(self, path: str) -> Any:
        text = await self.get_text(path)
        try:
            return json.loads(text)
        except ValueError:
            raise NoriaError(
                f"GET {path} was not answered with JSON; is --base-url that of an OpenAI server?"
            ) from None

    def body(self, question: Question) -> bytes:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.endpoint.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            body["prompt"] = question.prompt
        return msgspec.json.encode({**body, "max_tokens": question.output_len, **self._extra})

    async def ask(self, question: Question, *, leave_after: int | None = None) -> Record:
        """Sends one request and follows its answer to the end; leave_after: or to so many parts with text."""
        body = self.body(question)
        record = Record(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                if not await self._follow(body, record, leave_after):
                    _check(record)
        except _Refusal as refusal:
            record.error, record.detail = refusal.kind, refusal.detail
        except TimeoutError:
            record.error, record.detail = "timeout", f"no whole answer within {self._timeout_s:g} s"
        except httpx.ConnectError as error:
            record.error, record.detail = "connect", _words(error)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            kind = "cut" if record.end else "connection"
            record.error, record.detail = kind, f"after {len(record.news)} parts: {_words(error)}"
        record.end = record.end or time.perf_counter()
        return record

    async def _follow(self, body: bytes, record: Record, leave_after: int | None) -> bool:
        """Whether this client left before the end."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._http.stream("POST", self.endpoint, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise _Refusal(f"HTTP {response.status_code}", _complaint(await response.aread()))
            parser, done, left, texts = EventParser(), False, False, list[str]()
            async for data in response.aiter_raw():
                now = time.perf_counter()
                try:
                    for event in parser.feed(data):
                        done = done or event == b"[DONE]"
                        if not done:
                            self._take(event, record, now, texts)
                except (msgspec.MsgspecError, UnicodeDecodeError, NoriaError) as error:
                    raise _Refusal("invalid", str(error)) from None
                left = leave_after is not None and len(record.news) >= leave_after and not done
                if left:
                    break
        if self._keep_text:
            record.text = "".join(texts)
        if not done and not left:
            raise _Refusal("cut", f"the stream ended after {len(record.news)} parts and without [DONE]")
        return left

    def _take(self, event: bytes, record: Record, now: float, texts: list[str]) -> None:
        chunk = self._decode(event)
        if chunk.error is not None:
            raise _Refusal("error event", _complaint(msgspec.json.encode({"error": chunk.error})))
        for choice in chunk.choices or ():
            record.end = now
            text = choice.text or ""
            if (delta := choice.delta) is not None:
                text = delta.content or delta.reasoning_content or delta.reasoning or ""
            if text or (choice.delta is not None and choice.delta.tool_calls):
                record.news.append(now)
                if self._keep_text:
                    texts.append(text)
        if (usage := chunk.usage) is not None:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens or 0, usage.completion_tokens or 0
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0


def _check(record: Record) -> None:
    if not record.prompt_tokens:
        raise _Refusal("no usage", "the stream has no token counts although stream_options asked for them")
    if not record.output_tokens or not record.end:
        raise _Refusal("empty", "the answer has no token")


def _complaint(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or whatever was sent instead."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[: 4 * _DETAIL].decode("utf-8", errors="replace").strip() or "no reason given"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


async def trial(client: LoadClient, candidates: list[Prompt]) -> Prompt:
    """The first of some prompts that the server takes, of which one token is asked. Raises NoriaError for none."""
    record = Record(0.0)
    for prompt in candidates:
        record = await client.ask(Question(prompt, 1))
        if not record.error:
            return prompt
        if record.error not in ("HTTP 400", "HTTP 422"):
            break
    raise NoriaError(f"the server failed at a first request ({record.error}): {record.detail}")
