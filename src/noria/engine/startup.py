"""From options to an engine core that is ready to serve: everything that happens before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from noria.cache.paged_cache import PagedCache
from noria.config import EngineConfig, ModelLimits, ResolvedConfig, cache_home
from noria.engine.core import EngineCore
from noria.engine.hosts.lead import Hosts, LeadRunner
from noria.engine.hosts.world import greet
from noria.engine.structured import StructuredRequests
from noria.errors import ConfigError
from noria.grammar.compiler import GrammarCompiler
from noria.models.registry import build_model
from noria.parallel.mesh import MeshShape, devices_of_hosts, make_mesh, pick_devices
from noria.runner.capture import CaptureReport
from noria.runner.memory import MemoryPlan
from noria.runner.runner import ModelRunner
from noria.scheduler.scheduler import Scheduler
from noria.text.tokenizer import Tokenizer, load_tokenizer, no_tokenizer
from noria.weights.base import Checkpoint
from noria.weights.checkpoint import open_checkpoint
from noria.weights.hub import resolve_model

_log = logging.getLogger(__name__)
# Yields a function (done, total) that shows how far something is; the text says what.
ProgressBar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


def no_bar(stage: str) -> AbstractContextManager[Callable[[int, int], None]]:
    return nullcontext(lambda done, total: None)


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
    hosts: Hosts | None = None  # the others, where several run the engine

    def check_hosts(self) -> None:
        """Raises EngineDeadError when one of them is gone."""
        if self.hosts is not None:
            self.hosts.check()


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
    engine = _start(config, progress, programs_only=True)
    engine.core.close()
    return engine.report


def _start(config: EngineConfig, progress: ProgressBar | None, *, programs_only: bool) -> Engine:
    if config.nnodes == 1:
        return _begin(config, progress, None, programs_only)
    if config.node_rank:
        raise ConfigError(
            f"node_rank {config.node_rank} follows host 0 and answers nothing itself: start it with noria serve, or "
            "with noria.follow in Python"
        )
    bar = progress or no_bar
    with bar(f"waiting for {config.nnodes - 1} other hosts at {config.master_addr}:{config.master_port}"):
        hosts = Hosts.meet(config)
    try:
        return _begin(config, progress, hosts, programs_only)
    except BaseException as error:
        hosts.fail(error)
        raise


def _begin(config: EngineConfig, progress: ProgressBar | None, hosts: Hosts | None, programs_only: bool) -> Engine:
    bar = progress or no_bar
    if hosts is None:
        mesh, make = make_engine_mesh(config), ModelRunner
    else:
        with hosts.guard():
            mesh, make = make_engine_mesh(config), partial(LeadRunner, hosts)
            greet(mesh)
    path = find_model(config)
    with open_checkpoint(path, config_only=config.load_format == "dummy") as checkpoint:
        tokenizer = _tokenizer(config, path)
        runner = build_runner(make, config, checkpoint, mesh, tokenizer.vocab_size)
        runner.profile_run()
        begin = time.perf_counter()
        plan = _load(runner, checkpoint, bar, programs_only)
        eos = _eos_token_ids(checkpoint, tokenizer, runner.model.config.vocab_size)
    load_s = time.perf_counter() - begin
    capture = _prepare(runner, plan.num_blocks, bar, programs_only)
    report = StartupReport(capture.programs, capture.compiled, load_s, capture.seconds, plan)
    _log.info("%s", report)
    resolved, vocab_size = runner.config, runner.model.config.vocab_size
    structured = StructuredRequests(GrammarCompiler(tokenizer, eos), vocab_size)
    core = EngineCore(runner, _scheduler(resolved, runner, plan), structured, resolved.async_scheduling)
    return Engine(resolved, core, tokenizer, vocab_size, eos, report, hosts)


def find_model(config: EngineConfig) -> Path:
    """Where the model lies on this host. Raises WeightsError."""
    return resolve_model(config.model, config.revision, cache_home())


def build_runner(
    make: Callable[..., ModelRunner], config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, num_valid_tokens: int
) -> ModelRunner:
    """make: ModelRunner or a function with its arguments. num_valid_tokens: ids the tokenizer knows; 0 for all that
    the model has. Raises ConfigError."""
    model, platform = build_model(checkpoint.config), mesh.devices.flat[0].platform
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    resolved = config.resolve(limits, platform)
    dtype = _dtype(config, checkpoint, platform)
    return make(resolved, model, dtype, mesh, num_valid_tokens or model.config.vocab_size)


def load_weights_or_shapes(
    runner: ModelRunner, checkpoint: Checkpoint, *, programs_only: bool, bar: ProgressBar = no_bar
) -> None:
    """Raises WeightsError."""
    source = None if runner.config.load_format == "dummy" else checkpoint
    if programs_only:
        runner.describe_model(source)
    else:
        with bar("loading weights") as show:
            runner.load_model(source, show)


def _load(runner: ModelRunner, checkpoint: Checkpoint, bar: ProgressBar, programs_only: bool) -> MemoryPlan:
    """Returns the plan with what the weights really take."""
    here = lambda: load_weights_or_shapes(runner, checkpoint, programs_only=programs_only, bar=bar)
    if isinstance(runner, LeadRunner):
        return runner.load(here, programs_only=programs_only)
    here()
    return runner.profile_run()


def _prepare(runner: ModelRunner, num_blocks: int, bar: ProgressBar, programs_only: bool) -> CaptureReport:
    def here() -> CaptureReport:
        runner.initialize_kv_cache(num_blocks, allocate=not programs_only)
        with bar("compiling") as show:
            return runner.capture_model(show)

    return runner.prepare(num_blocks, here) if isinstance(runner, LeadRunner) else here()


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


def make_engine_mesh(config: EngineConfig) -> Mesh:
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
    if config.nnodes > 1:
        devices = devices if order else devices_of_hosts(devices, size, config.nnodes)
        if devices[0].platform != "tpu":  # whose hosts count as slices each; here they are what the option says
            order = order or tuple(device.id for device in devices)
    if not order:
        return make_mesh(MeshShape(model=size), devices[:size])
    if len(order) != size:
        raise ConfigError(
            f"device_order names {len(order)} devices, but tensor_parallel_size is {size}; name one for each shard"
        )
    mesh = make_mesh(MeshShape(model=size), pick_devices(devices, order), order)
    if (here := len({device.process_index for device in mesh.devices.flat})) < config.nnodes:
        raise ConfigError(f"device_order names devices of {here} of the {config.nnodes} hosts; name some of each")
    return mesh


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
