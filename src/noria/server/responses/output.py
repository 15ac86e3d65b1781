"""The output items of one response while they grow: deltas of the model's text in, typed events out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from noria.server.ids import new_id
from noria.text.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """One item is open at a time; another kind of delta, or another call, closes it. Events have no number yet."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []  # those that are closed, as a response shows them
        self._with_logprobs = with_logprobs
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # index of the open call
        self._text = ""
        self._logprobs: list[Any] = []

    def take(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """logprobs: of the tokens that the next piece of content consists of."""
        match delta:
            case CallDelta():
                yield from self._take_call(delta)
            case ReasoningDelta(text):
                yield from self._switch("reasoning")
                yield from self._grow("response.reasoning_text.delta", text, content_index=0)
            case ContentDelta(text):
                yield from self._switch("message")
                self._logprobs += logprobs
                yield from self._grow("response.output_text.delta", text, content_index=0, logprobs=list(logprobs))

    def finish(self, status: Status, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The last item bears the mark of an answer that was cut off. An answer of nothing is an empty message.

        logprobs: of tokens after the last piece, which have no text.
        """
        if self._open is None and not self.items:
            yield from self._switch("message")
        self._logprobs += logprobs
        yield from self._close(status)

    def _take_call(self, delta: CallDelta) -> Iterator[Event]:
        if self._call != delta.index:
            yield from self._close("completed")
            self._call = delta.index
            call = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            yield from self._begin({"id": new_id("fc", "_"), "type": "function_call", **call})
        if delta.arguments:
            yield from self._grow("response.function_call_arguments.delta", delta.arguments)

    def _switch(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close("completed")
        if kind == "message":
            yield from self._begin({"id": new_id("msg", "_"), "type": kind, "role": "assistant", "content": []})
        else:
            yield from self._begin({"id": new_id("rs", "_"), "type": kind, "summary": [], "content": []})
        yield self._event("response.content_part.added", content_index=0, part=self._part())

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open, self._text, self._logprobs = item, "", []
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items),
            "item": {**item, "status": "in_progress"},
        }

    def _grow(self, kind: str, delta: str, **fields: Any) -> Iterator[Event]:
        self._text += delta
        yield self._event(kind, delta=delta, **fields)

    def _close(self, status: Status) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        part = self._part()
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=self._text)
            item["arguments"] = self._text
        else:
            if item["type"] == "message":
                logprobs = list(self._logprobs)
                yield self._event("response.output_text.done", content_index=0, text=self._text, logprobs=logprobs)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=self._text)
            yield self._event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open = self._call = None

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        logprobs = {"logprobs": list(self._logprobs)} if self._with_logprobs else {}
        return {"type": "output_text", "text": self._text, "annotations": [], **logprobs}

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items), **fields}
