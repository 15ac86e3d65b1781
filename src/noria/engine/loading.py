"""What every host does at its start: runners for the model and for one that drafts, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from jax.sharding import Mesh

from noria.config import EngineConfig, ModelLimits, cache_home
from noria.engine.eagle3 import HeadFiles
from noria.errors import ConfigError
from noria.models.registry import build_model
from noria.parallel.mesh import regroup
from noria.parallel.rules import shape_for_drafts
from noria.runner.draft_options import check_vocabulary, draft_options
from noria.runner.memory import available_bytes
from noria.runner.runner import ModelRunner
from noria.weights.base import Checkpoint
from noria.weights.hub import resolve_model

# Yields a function (done, total) that shows how far something is; the text says what.
ProgressBar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


def no_bar(stage: str) -> AbstractContextManager[Callable[[int, int], None]]:
    return nullcontext(lambda done, total: None)


def find_model(config: EngineConfig) -> Path:
    """Where the model lies on this host. Raises WeightsError."""
    return resolve_model(config.model, config.revision, cache_home())


def build_runner(
    make: Callable[..., ModelRunner],
    config: EngineConfig,
    checkpoint: Checkpoint,
    mesh: Mesh,
    num_valid_tokens: int,
    head: HeadFiles | None = None,
) -> ModelRunner:
    """make: ModelRunner or a function with its arguments. num_valid_tokens: ids the tokenizer knows; 0 for all that
    the model has. Raises ConfigError."""
    model, platform = build_model(checkpoint.config), mesh.devices.flat[0].platform
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    resolved = config.resolve(limits, platform)
    dtype, valid = choose_dtype(config, checkpoint, platform), num_valid_tokens or limits.vocab_size
    return make(resolved, model, dtype, mesh, valid, head and head.build(model.config))


def find_draft(config: EngineConfig) -> Path:
    """The same of the draft model."""
    options = config.speculation
    assert options is not None
    assert options.model is not None
    return resolve_model(options.model, options.revision, cache_home())


def build_draft_runner(
    make: Callable[..., ModelRunner],
    checkpoint: Checkpoint,
    target: ModelRunner,
    num_valid_tokens: int,
    num_blocks: int | None = None,
) -> ModelRunner:
    """Of the draft model, on the devices of the target. checkpoint: its own. num_blocks: see draft_options. The other
    arguments are as of build_runner. Raises ConfigError."""
    options, mesh = target.config.speculation, target.placement.mesh
    assert options is not None
    model = build_model(checkpoint.config)
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    shape = shape_for_drafts(model.config, mesh)
    available = available_bytes(target.placement.local_devices)
    own = draft_options(target.config, shape, target.platform, available, num_blocks)
    try:
        check_vocabulary(limits.vocab_size, target.model.config.vocab_size, num_valid_tokens)
        resolved = own.resolve(limits, target.platform)
        dtype = choose_dtype(own, checkpoint, target.platform)
        runner = make(resolved, model, dtype, regroup(mesh, shape), num_valid_tokens)
        runner.clock = target.clock  # they keep the same devices busy
        check_memory(runner, checkpoint)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: the draft model {options.model}: {error}") from None
    return runner


def check_memory(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    """Before anything is read, with the weights as they will lie there: what a GGUF file packs is not unpacked.

    Raises ConfigError when the model does not fit, and WeightsError.
    """
    runner.describe_model(_source(runner, checkpoint))
    runner.profile_run()


def load_weights_or_shapes(
    runner: ModelRunner,
    checkpoint: Checkpoint,
    head: HeadFiles | None = None,
    *,
    programs_only: bool,
    bar: ProgressBar = no_bar,
) -> None:
    """Of several hosts all at the same time. head: of the runner's, if it has one. Raises WeightsError, or ConfigError
    for the head."""
    if runner.config.nnodes > 1:
        from noria.engine.hosts.world import greet

        for mesh in runner.meshes:  # what drafts has one of its own
            greet(mesh)
    if head is not None:
        head.load(runner, programs_only=programs_only)
    source = _source(runner, checkpoint)
    if programs_only:
        runner.describe_model(source)
    else:
        with bar("loading weights") as show:
            runner.load_model(source, show)


def _source(runner: ModelRunner, checkpoint: Checkpoint) -> Checkpoint | None:
    return None if runner.config.load_format == "dummy" else checkpoint


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint, platform: str) -> str:
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
