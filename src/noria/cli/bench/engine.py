"""What the benchmarks of a model share: its options, its start, and how a figure compares with the machine's limits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noria.cli import options
from noria.cli.bench.machine import Limits
from noria.cli.display import fetch
from noria.cli.run import start
from noria.config import EngineConfig, SamplingParams
from noria.observe.machine import peak_memory_bytes

if TYPE_CHECKING:
    from noria.engine.llm import LLM
    from noria.runner.work import Work


def engine_options() -> type:
    """The sizes are those that the peers are given."""
    return options.engine_options(offer=("skip_tokenizer_init",), max_model_len=2048, max_num_seqs=64)


def engine_config(model: str, chosen: Any) -> EngineConfig:
    return EngineConfig(model=model, **options.values_of(chosen))


def start_engine(config: EngineConfig) -> LLM:
    return start(config, fetch(config.model, config.revision))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def startup_figures(llm: LLM, prompt: Sequence[int], begin: float) -> dict[str, Any]:
    """Answers a first request. begin: when the command began, in seconds of time.perf_counter()."""
    llm.generate([list(prompt)], greedy(1))
    first_token_s = time.perf_counter() - begin
    report = llm.stats.startup
    return {
        "workload": "startup",
        "load_s": round(report.load_s, 3),
        "warmup_s": round(report.warmup_s, 3),
        "programs": report.programs,
        "compiled": report.compiled,
        "time_to_first_token_s": round(first_token_s, 3),
        "weights_mib": round(report.memory.weights / 2**20, 1),
        "peak_mib": peak_mib(),
        "dtype": llm.engine.core.runner.dtype,
        "kv_cache_dtype": llm.engine.core.runner.cache_dtype,
    }


def peak_mib() -> float:
    return round(peak_memory_bytes() / 2**20, 1)


def against_limits(work: Work, seconds: float, limits: Limits) -> dict[str, float]:
    """Rates, and their fraction of what the machine can do."""
    gb_s, gflop_s = work.bytes_read / seconds / 1e9, work.flops / seconds / 1e9
    return {
        "gb_s": round(gb_s, 2),
        "gb_s_fraction": round(gb_s / limits.read_gb_s, 3),
        "gflop_s": round(gflop_s, 1),
        "gflop_s_fraction": round(gflop_s / limits.gflop_s, 3),
    }


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}%"


def limits_line(limits: Limits) -> dict[str, Any]:
    return {"workload": "machine", **dataclasses.asdict(limits)}
