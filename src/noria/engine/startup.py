"""From options to an engine core that is ready to serve: everything that happens before the first request."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from noria.cache.paged_cache import PagedCache
from noria.config import EngineConfig, ModelLimits, ResolvedConfig, cache_home
from noria.engine.core import EngineCore
from noria.engine.structured import StructuredRequests
from noria.errors import ConfigError
from noria.grammar.compiler import GrammarCompiler
from noria.models.registry import build_model
from noria.parallel.mesh import MeshShape, make_mesh, pick_devices
from noria.runner.memory import MemoryPlan
from noria.runner.runner import ModelRunner
from noria.runner.stored import StoredPrograms
from noria.scheduler.scheduler import Scheduler
from noria.text.tokenizer import Tokenizer, load_tokenizer, no_tokenizer
from noria.weights.base import Checkpoint
from noria.weights.checkpoint import open_checkpoint
from noria.weights.hub import resolve_model

_log = logging.getLogger(__name__)
# Yields a function (done, total) that shows how far something is; the text says what.
ProgressBar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class StartupReport:
    programs: int  # device programs that serving needs
    compiled: int  # of those, not found in the persistent cache
    load_s: float  # reading and placing the weights
    warmup_s: float  # compiling or fetching the programs
    memory: MemoryPlan

    def __str__(self) -> str:
        return (
            f"loaded in {self.load_s:.1f} s; {self.programs} programs ready in {self.warmup_s:.1f} s "
            f"({self.compiled} compiled)\n{self.memory}"
        )


@dataclass(frozen=True)
class Engine:
    """A started engine and what its fronts need to know."""

    config: ResolvedConfig
    core: EngineCore
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    report: StartupReport


def start(config: EngineConfig, progress: ProgressBar | None = None) -> Engine:
    """Resolves, loads, plans memory and compiles. What is wrong with the options shows before anything is compiled.

    Raises ConfigError or WeightsError.
    """
    return _start(config, progress, programs_only=False)


def compile_programs(config: EngineConfig, progress: ProgressBar | None = None) -> StartupReport:
    """Fills the persistent compile cache with what `start` would need, without reading the weights.

    Raises ConfigError or WeightsError like start, and ConfigError when the persistent compile cache is turned off.
    """
    if config.compile_cache_dir == "":
        raise ConfigError(
            'compile_cache_dir "" turns the compile cache off, so there is nothing to fill; name a folder'
        )
    if config.programs_dir is not None:
        raise ConfigError("programs_dir: here programs are compiled, not fetched; leave it out")
    engine = _start(config, progress, programs_only=True)
    engine.core.close()
    return engine.report


def _start(config: EngineConfig, progress: ProgressBar | None, *, programs_only: bool) -> Engine:
    bar = progress or (lambda _: nullcontext(lambda done, total: None))
    mesh = _mesh(config)
    platform = mesh.devices.flat[0].platform
    path = resolve_model(config.model, config.revision, cache_home())
    with open_checkpoint(path, config_only=config.load_format == "dummy") as checkpoint:
        model = build_model(checkpoint.config)
        limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
        resolved, stored = _with_stored_programs(config.resolve(limits, platform))
        tokenizer = _tokenizer(config, path)
        dtype = _dtype(config, checkpoint, platform)
        runner = ModelRunner(resolved, model, dtype, mesh, tokenizer.vocab_size or model.config.vocab_size)
        if stored is not None:
            stored.check(runner.origin)
        runner.profile_run()
        source = None if config.load_format == "dummy" else checkpoint
        begin = time.perf_counter()
        if programs_only:
            runner.describe_model(source)
        else:
            with bar("loading weights") as show:
                runner.load_model(source, show)
        eos = _eos_token_ids(checkpoint, tokenizer, model.config.vocab_size)
    load_s = time.perf_counter() - begin
    plan = runner.profile_run()  # now with what the weights really take
    runner.initialize_kv_cache(plan.num_blocks, allocate=not programs_only)
    with bar("compiling") as show:
        capture = runner.capture_model(show, stored)
    report = StartupReport(capture.programs, capture.compiled, load_s, capture.seconds, plan)
    _log.info("%s", report)
    structured = StructuredRequests(GrammarCompiler(tokenizer, eos), model.config.vocab_size)
    core = EngineCore(runner, _scheduler(resolved, runner, plan), structured, resolved.async_scheduling)
    return Engine(resolved, core, tokenizer, model.config.vocab_size, eos, report)


def _with_stored_programs(config: ResolvedConfig) -> tuple[ResolvedConfig, StoredPrograms | None]:
    """programs_dir says how large the cache is. Raises ConfigError when there are no programs, or for another size."""
    if config.programs_dir is None:
        return config, None
    stored, asked = StoredPrograms.open(Path(config.programs_dir)), config.num_blocks_override
    if asked not in (None, stored.num_blocks):
        raise ConfigError(
            f"num_blocks_override ({asked}) is not the {stored.num_blocks} blocks that the programs in programs_dir "
            "take; leave it out"
        )
    return dataclasses.replace(config, num_blocks_override=stored.num_blocks), stored


def _scheduler(config: ResolvedConfig, runner: ModelRunner, plan: MemoryPlan) -> Scheduler:
    cache = PagedCache(runner.layout, plan.num_blocks, config.block_size, config.enable_prefix_caching)
    return Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        num_scheduler_steps=config.num_scheduler_steps,
    )


def _tokenizer(config: EngineConfig, model: Path) -> Tokenizer:
    if config.skip_tokenizer_init:
        return no_tokenizer()
    return load_tokenizer(Path(config.tokenizer) if config.tokenizer else model, config.chat_template)


def _mesh(config: EngineConfig) -> Mesh:
    """Of the first devices there are, or of those that device_order names."""
    try:
        devices = jax.devices(None if config.device == "auto" else config.device)
    except RuntimeError:
        raise ConfigError(
            f"device {config.device}: JAX finds no such device here; it has {jax.default_backend()}"
        ) from None
    size, order = config.tensor_parallel_size, config.device_order
    if size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size ({size}) needs as many devices, but there are {len(devices)} here "
            f"({devices[0].platform}); lower it"
        )
    if not order:
        return make_mesh(MeshShape(model=size), devices[:size])
    if len(order) != size:
        raise ConfigError(
            f"device_order names {len(order)} devices, but tensor_parallel_size is {size}; name one for each shard"
        )
    return make_mesh(MeshShape(model=size), pick_devices(devices, order), order)


def _dtype(config: EngineConfig, checkpoint: Checkpoint, platform: str) -> str:
    """auto: what the checkpoint stores; packed files unpack to float32 on a CPU and to bfloat16 elsewhere."""
    dtype = config.dtype
    if dtype == "auto":
        packed = "float32" if platform == "cpu" else "bfloat16"
        dtype = packed if checkpoint.quantized else checkpoint.native_dtype
        if platform == "tpu" and dtype == "float16":
            dtype = "bfloat16"
    for option, value in (("dtype", dtype), ("kv_cache_dtype", config.kv_cache_dtype)):
        if platform == "tpu" and value == "float16":
            raise ConfigError(f"{option} float16: a TPU does not compute in float16; use bfloat16")
    return dtype


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text, by the tokenizer or by the model's generation config."""
    declared = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    return tuple(sorted({*tokenizer.eos_token_ids, *(i for i in ids if 0 <= i < vocab_size)}))
