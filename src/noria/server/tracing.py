"""OpenTelemetry: a span for each prompt, with the attributes of the GenAI conventions and vLLM's names of latencies.

Needs the extra `otel`; only imported when spans are wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from noria import __version__
from noria.config import SamplingParams
from noria.engine.outputs import RequestMetrics, RequestOutput

_EXPORT_TIMEOUT_S = 3.0  # a collector that does not answer must not keep a server from leaving
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_Value = str | int | float | list[str]


class Tracing:
    def __init__(self, provider: TracerProvider, model: str) -> None:
        """model: what answers call it."""
        self._provider = provider
        self._tracer = provider.get_tracer("noria", __version__)
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str, model: str) -> Self:
        """endpoint: the whole URL that takes OTLP over HTTP. Spans are sent in batches, by a thread."""
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "noria"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)))
        return cls(provider, model)

    @contextmanager
    def incoming(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Spans begun within belong to the trace that the client's headers name, if any."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE_HEADERS}
        token = context.attach(self._propagator.extract(carrier))
        try:
            yield
        finally:
            context.detach(token)

    def request(self, request_id: str, params: SamplingParams) -> RequestSpan:
        """request_id: "cmpl-..." for a continued text."""
        return RequestSpan(self, request_id, params)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class RequestSpan:
    """Use as a context manager around the parts of an answer."""

    def __init__(self, tracing: Tracing, request_id: str, params: SamplingParams) -> None:
        operation = "text_completion" if request_id.startswith("cmpl-") else "chat"
        self._span = tracing._tracer.start_span(
            f"{operation} {tracing._model}",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "noria",
                "gen_ai.request.model": tracing._model,
                "gen_ai.response.model": tracing._model,
                "gen_ai.response.id": request_id,
                **_asked(params),
            },
        )
        self._num_tokens = 0
        self._reasons: dict[int, str] = {}  # by choice

    def see(self, part: RequestOutput) -> None:
        self._num_tokens += sum(len(output.token_ids) for output in part.outputs)
        for output in part.outputs:
            if output.finish_reason is not None:
                self._reasons[output.index] = str(output.finish_reason)
        if part.finished:
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": len(part.prompt_token_ids),
                    "gen_ai.usage.cache_read.input_tokens": part.num_cached_tokens,
                    **_latencies(part.metrics),
                }
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        reasons = [reason for _, reason in sorted(self._reasons.items())]
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            reasons = reasons or ["abort"]  # the client left
        elif error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.end()


def _asked(params: SamplingParams) -> dict[str, _Value]:
    """The parameters that the conventions have a name for."""
    wanted: dict[str, _Value | None] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else None,
        "max_tokens": params.max_tokens,
        "seed": params.seed if params.seed is None or params.seed < 2**63 else None,  # attributes are signed
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
        "choice.count": params.n if params.n != 1 else None,
        "stop_sequences": list(params.stop_strings) or None,
    }
    return {f"gen_ai.request.{name}": value for name, value in wanted.items() if value is not None}


def _latencies(times: RequestMetrics) -> dict[str, float]:
    """Seconds, by vLLM's names; only those that are known."""
    points = {
        "e2e": (times.arrival_time, times.finished_time),
        "time_in_queue": (times.arrival_time, times.scheduled_time),
        "time_to_first_token": (times.arrival_time, times.first_token_time),
        "time_in_model_prefill": (times.scheduled_time, times.first_token_time),
        "time_in_model_decode": (times.first_token_time, times.finished_time),
        "time_in_model_inference": (times.scheduled_time, times.finished_time),
    }
    return {
        f"gen_ai.latency.{name}": end - begin
        for name, (begin, end) in points.items()
        if begin is not None and end is not None
    }
