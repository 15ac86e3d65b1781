"""Spans of requests, and what is refused without the packages for them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fake_engine import Service, Visitor, run, service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from test_refusals import CHAT, COMPLETIONS, GOOD, HELLO

from noria.errors import ConfigError
from noria.server import lifecycle
from noria.server.settings import ServerConfig
from noria.server.tracing import Tracing
from noria.text.tokenizer import Tokenizer

PARENT = {"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}


def spans_of(tokenizer: Tokenizer, work: Any, **options: Any) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def traced() -> None:
        async with service(tokenizer, **options) as running:
            running.state.tracing = Tracing(provider, "parrot")
            await work(running)
            await running.until_idle()

    run(traced())
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_span_says_what_was_asked_and_how_long_it_took(tokenizer: Tokenizer, streamed: bool) -> None:
    body = {**GOOD, "n": 2, "seed": 5, "stop": ["zzz"], "top_p": 0.5, "stream": streamed}

    async def work(running: Service) -> None:
        assert (await running.http.post(COMPLETIONS, json=body, headers=PARENT)).status_code == 200

    [span] = spans_of(tokenizer, work)
    found = dict(span.attributes or {})
    assert span.name == "text_completion parrot"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" in PARENT["traceparent"]
    assert {name.removeprefix("gen_ai.request."): found[name] for name in found if ".request." in name} == {
        "model": "parrot",
        "temperature": 1.0,
        "top_p": 0.5,
        "max_tokens": GOOD["max_tokens"],
        "seed": 5,
        "choice.count": 2,
        "stop_sequences": ("zzz",),
    }
    assert str(found["gen_ai.response.id"]).startswith("cmpl-")
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.usage.input_tokens"] == len(tokenizer.encode(GOOD["prompt"]))
    assert found["gen_ai.usage.output_tokens"] == 2 * GOOD["max_tokens"]
    latencies: Any = {name.removeprefix("gen_ai.latency."): found[name] for name in found if ".latency." in name}
    assert set(latencies) == {
        *("e2e", "time_in_queue", "time_to_first_token"),
        *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
    }
    assert all(0 <= seconds <= latencies["e2e"] < 30 for seconds in latencies.values())
    assert span.status.status_code is StatusCode.UNSET


def test_each_prompt_has_a_span_of_a_trace_of_its_own(tokenizer: Tokenizer) -> None:
    async def work(running: Service) -> None:
        await running.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
        await running.http.post(COMPLETIONS, json={**GOOD, "prompt": ["a", "b"]})

    spans = spans_of(tokenizer, work)
    assert sorted(span.name.split()[0] for span in spans) == ["chat", "text_completion", "text_completion"]
    assert all(span.parent is None for span in spans)


def test_clients_that_leave_and_answers_that_fail(tokenizer: Tokenizer) -> None:
    async def leave(running: Service) -> None:
        visitor = Visitor(running.app, COMPLETIONS, json.dumps({**GOOD, "max_tokens": 90, "stream": True}).encode())
        await running.steps(4)
        visitor.leave()
        await visitor.task

    [left] = spans_of(tokenizer, leave, step_s=0.002)
    assert dict(left.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert left.status.status_code is StatusCode.UNSET

    async def late(running: Service) -> None:
        assert (await running.http.post(COMPLETIONS, json={**GOOD, "max_tokens": 90})).status_code == 504

    [failed] = spans_of(tokenizer, late, step_s=0.01, request_timeout=0.05)
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})["error.type"] == "RequestTimeoutError"


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Its URL, and what it gets."""
    found: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector(tokenizer: Tokenizer) -> None:
    with collector() as (url, found):
        tracing = lifecycle.open_tracing(url, "parrot")
        assert tracing is not None

        async def work() -> None:
            async with service(tokenizer) as running:
                running.state.tracing = tracing
                await running.http.post(COMPLETIONS, json=GOOD)
            await asyncio.to_thread(tracing.close)

        run(work())
    [resource] = [each for request in found for each in request.resource_spans]
    names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert names["service.name"] == "noria"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["text_completion parrot"]


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lifecycle.open_tracing(None, "parrot") is None
    monkeypatch.delitem(sys.modules, "noria.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=re.escape("install noria with the extra otel: noria[otel]")):
        lifecycle.open_tracing("http://localhost:4318/v1/traces", "parrot")


def test_what_is_no_url() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
