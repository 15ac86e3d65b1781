"""Metrics for Prometheus: vLLM's names with the prefix noria:, so that dashboards move over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.config import SamplingParams
from noria.engine.client import EngineClient
from noria.engine.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_NUMBERS = (1, 2, 5, 10, 20)


class ServerMetrics:
    """Counts what requests get here, and shows what the engine says of itself. One registry of its own."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        labels = {"model_name": model_name}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"noria:{name}", text, list(labels), registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"noria:{name}", text, list(labels), registry=self._registry, buckets=buckets).labels(
                **labels
            )

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of requests that got their first token.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SHORT_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between parts of one answer.", _SHORT_S)
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", _LONG_S)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG_S)
        self.prefill_time = histogram("request_prefill_time_seconds", "First step to first token.", _LONG_S)
        self.decode_time = histogram("request_decode_time_seconds", "From the first to the last token.", _LONG_S)
        self.inference_time = histogram("request_inference_time_seconds", "From the first step to the end.", _LONG_S)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of all its answers.", _TOKENS)
        self.request_params_n = histogram("request_params_n", "The parameter n.", _NUMBERS)
        self.request_params_max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", _TOKENS)
        self._success = Counter(
            "noria:request_success",
            "Answers that ended, by reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self.success: Callable[[str], Counter] = lambda reason: self._success.labels(
            model_name=model_name, finished_reason=reason
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class RequestTimer:
    """Follows the parts of one request's answer."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._last = 0.0
        self._num_tokens = 0

    def see(self, part: RequestOutput) -> None:
        metrics, now = self._metrics, time.perf_counter()
        new = sum(len(output.token_ids) for output in part.outputs)
        if new:
            if self._num_tokens:
                metrics.inter_token.observe(now - self._last)
            else:
                metrics.prompt_tokens.inc(len(part.prompt_token_ids))
                metrics.first_token.observe(now - part.metrics.arrival_time)
            self._last, self._num_tokens = now, self._num_tokens + new
            metrics.generation_tokens.inc(new)
        for output in part.outputs:
            if output.finish_reason is not None:
                metrics.success(str(output.finish_reason)).inc()
        if part.finished:
            self._finish(part, now)

    def _finish(self, part: RequestOutput, now: float) -> None:
        metrics, times = self._metrics, part.metrics
        metrics.end_to_end.observe(now - times.arrival_time)
        metrics.request_prompt_tokens.observe(len(part.prompt_token_ids))
        metrics.request_generation_tokens.observe(self._num_tokens)
        metrics.request_params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.request_params_max_tokens.observe(self._params.max_tokens)
        if times.scheduled_time is not None and times.first_token_time is not None:
            metrics.queue_time.observe(times.scheduled_time - times.arrival_time)
            metrics.prefill_time.observe(times.first_token_time - times.scheduled_time)
            metrics.decode_time.observe(now - times.first_token_time)
            metrics.inference_time.observe(now - times.scheduled_time)


class _EngineCollector(Collector):
    """The engine's own numbers, read when somebody asks. None while no engine has said anything yet."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        if (stats := self._engine.stats) is None:
            return
        scheduler, cache, times, drafts = stats.scheduler, stats.scheduler.cache, stats.times, stats.speculation
        gauges = (
            ("num_requests_running", "Sequences in the batch.", scheduler.num_running),
            ("num_requests_waiting", "Sequences that wait for a place.", scheduler.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", cache.usage),
            ("kv_cache_blocks_free", "Blocks of the KV cache that are free.", cache.num_free),
            ("prefix_cache_hit_rate", "Share of looked-up tokens found in the cache, 0 to 1.", cache.hit_rate),
            ("host_gap_share", "Share of the working time in which the device waited, 0 to 1.", times.host_share),
        )
        counters = (
            ("num_preemptions", "Requests that lost their place and started over.", scheduler.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.prefix_queries),
            ("prefix_cache_hits", "Of those found.", cache.prefix_hits),
            ("spec_decode_num_drafts", "Bursts of drafts that were verified.", drafts.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts that were verified.", drafts.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Of those right.", drafts.num_accepted_tokens),
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("engine_step_seconds", "Time in which there was work.", times.wall_s),
            ("engine_host_gap_seconds", "Of that, the device waited for the host.", times.gap_s),
            (
                "compiles_after_warmup",
                "Programs compiled while serving; 0 unless something is wrong.",
                stats.compiles_after_warmup,
            ),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                family = kind(f"noria:{name}", text, labels=["model_name"])
                family.add_metric([self._model_name], value)
                yield family
        family = CounterMetricFamily(
            "noria:spec_decode_num_accepted_tokens_per_pos",
            "Right drafts by their place in the burst.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(drafts.accepted_per_position):
            family.add_metric([self._model_name, str(position)], count)
        yield family
