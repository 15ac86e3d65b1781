"""An engine's device side for some TPUs, before anything is compiled: mesh, shapes, and how memory is divided."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from noria.aot.devices import compile_only_devices
from noria.aot.estimate import Estimator
from noria.aot.models import load_config
from noria.aot.programs import ProgramFigures
from noria.aot.topologies import Topology
from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError, WeightsError
from noria.models.config import DecoderConfig
from noria.models.decoder import Decoder
from noria.models.eagle3 import build_head
from noria.models.registry import build_model
from noria.nn.param import param_bytes
from noria.parallel.mesh import AXES, MeshShape, make_mesh, pick_devices, regroup
from noria.parallel.rules import on_one_device, possible_sizes, shape_for_drafts, with_kv_copies
from noria.runner.draft_options import check_vocabulary, draft_options
from noria.runner.memory import MemoryPlan, plan_memory
from noria.runner.runner import ModelRunner

# Grids by the number of axes and of chips.
_PARTS: Mapping[int, Mapping[int, tuple[int, ...]]] = MappingProxyType(
    {
        2: MappingProxyType({4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8)}),
        3: MappingProxyType({4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """context: tokens in the cache of each request that decodes. draft: of the draft model, if there is one."""

    topology: Topology
    config: ResolvedConfig
    model: Decoder
    dtype: str
    context: int
    runner: ModelRunner
    memory: MemoryPlan
    draft: Setup | None = None

    @property
    def rows(self) -> int:
        """Requests of `context` tokens that decode together, as far as the cache allows; as many on each rank."""
        ranks = self.config.num_ranks
        fitting = int(self.memory.max_concurrency / ranks * self.config.max_model_len) // (self.context + 1)
        return ranks * max(1, min(self.config.max_num_seqs // ranks, fitting))

    @property
    def layers_in_loop(self) -> int | None:
        """Of the loop that a forward pass is; None where layers differ, so that it is two."""
        c = self.model.config
        return c.num_layers if c.num_dense_layers in (0, c.num_layers) else None

    def estimator(self, programs: Sequence[ProgramFigures]) -> Estimator:
        long = self.runner.shape.long
        return Estimator(
            self.topology.chip.device,
            self.config,
            self.runner.buckets,
            self.runner.work_model(),
            self.context,
            programs,
            0 if long is None else long.num_rows,
        )


def prepare(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    topology: Topology,
    *,
    context: int | None = None,
    num_valid_tokens: int | None = None,
) -> Setup:
    """config: its sizes multiply to the devices that are used, with a copy of the model in each slice at least.
    context: None for half of most_model_len, if that is given, or of max_model_len. num_valid_tokens: ids that the
    tokenizer knows; None: all of the vocabulary.

    Raises ConfigError when something is wrong with the options, or the model does not fit; WeightsError when the model
    is not supported.
    """
    model = build_model(model_config)
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    changes: dict[str, Any] = {
        "compile_cache_dir": config.compile_cache_dir or "",
        "compile_threads": compile_threads(config, topology),
        "data_parallel_size": copies_in_slice(config, topology) * topology.num_slices,
    }
    resolved = dataclasses.replace(config, **changes).resolve(limits, "tpu")
    context = (resolved.most_model_len or resolved.max_model_len) // 2 if context is None else context
    if not 0 <= context < resolved.max_model_len:
        raise ConfigError(f"context ({context}) must be below max_model_len ({resolved.max_model_len}); lower it")
    if resolved.programs_dir is not None:
        raise ConfigError("programs_dir: here programs are compiled, not fetched; leave it out")
    dtype, needed = choose_dtype(config, model_config), num_valid_tokens or model.config.vocab_size
    drafter, head = _draft_config(resolved), None
    if drafter is not None and (options := resolved.speculation) and options.method == "eagle3":
        with _about_drafts(resolved):
            head = build_head(drafter, model.config)
    mesh = make_mesh(MeshShape.of(resolved), _choose_devices(resolved, topology), resolved.device_order)
    runner = ModelRunner(resolved, model, dtype, mesh, needed, head)
    runner.describe_model(None)
    available, draft = int(topology.chip.device.memory * resolved.memory_utilization), None
    if runner.head:
        runner.head.describe(None)
    elif drafter is not None:
        draft = _prepare_draft(runner, drafter, topology, available, needed, context)
        available -= draft.memory.weights + draft.memory.cache  # steps of the two take turns
    memory = _fit(runner, topology, model, dtype, available)
    runner.initialize_kv_cache(memory.num_blocks, allocate=False)
    return Setup(
        topology=topology,
        config=resolved,
        model=model,
        dtype=dtype,
        context=context,
        runner=runner,
        memory=memory,
        draft=draft,
    )


def _draft_config(config: ResolvedConfig) -> Mapping[str, Any] | None:
    """Of the draft head or the draft model that the options name. Raises ConfigError."""
    options = config.speculation
    if options is None or options.model is None:
        return None
    with _about_drafts(config):
        return load_config(options.model)


def _prepare_draft(
    target: ModelRunner,
    model_config: Mapping[str, Any],
    topology: Topology,
    available: int,
    num_valid_tokens: int,
    context: int,
) -> Setup:
    """A draft model beside its target, as at a start. available: bytes of a device. Raises ConfigError."""
    mesh = target.placement.mesh
    with _about_drafts(target.config):
        model = build_model(model_config)
        limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
        check_vocabulary(limits.vocab_size, target.model.config.vocab_size, num_valid_tokens)
        shape = shape_for_drafts(model.config, mesh)
        own = draft_options(target.config, shape, target.platform, available)
        resolved, dtype = own.resolve(limits, target.platform), choose_dtype(own, model_config)
        runner = ModelRunner(resolved, model, dtype, regroup(mesh, shape), num_valid_tokens)
        runner.describe_model(None)
        memory = runner.profile_run(available)
    runner.initialize_kv_cache(memory.num_blocks, allocate=False)
    return Setup(
        topology=topology, config=resolved, model=model, dtype=dtype, context=context, runner=runner, memory=memory
    )


@contextmanager
def _about_drafts(config: ResolvedConfig) -> Iterator[None]:
    """Errors say that they are of what drafts, and of which."""
    try:
        yield
    except (ConfigError, WeightsError) as error:
        assert config.speculation is not None
        kind = "draft head" if config.speculation.method == "eagle3" else "draft model"
        raise ConfigError(f"speculative_config: the {kind} {config.speculation.model}: {error}") from None


def choose_dtype(config: EngineConfig, model_config: Mapping[str, Any]) -> str:
    """As at the start on a TPU, from the config alone."""
    named = model_config.get("dtype") or model_config.get("torch_dtype")
    dtype = config.dtype if config.dtype != "auto" else "float32" if named == "float32" else "bfloat16"
    for option, value in (("dtype", dtype), ("kv_cache_dtype", config.kv_cache_dtype)):
        if value == "float16":
            raise ConfigError(f"{option} float16: a TPU does not compute in float16; use bfloat16")
    return dtype


def compile_threads(config: EngineConfig, topology: Topology) -> int | None:
    """Unless it is told otherwise, one for several slices: libtpu 0.0.42 sometimes crashed when it compiled several
    programs for them at once."""
    return 1 if config.compile_threads is None and topology.num_slices > 1 else config.compile_threads


def copies_in_slice(config: EngineConfig, topology: Topology) -> int:
    """Of the model. Raises ConfigError when data_parallel_size does not divide among the slices."""
    copies, rest = divmod(config.data_parallel_size, topology.num_slices)
    if config.data_parallel_size == 1:
        return 1  # nothing was said
    if rest:
        raise ConfigError(
            f"data_parallel_size ({config.data_parallel_size}) must be a multiple of the {topology.num_slices} slices "
            "(num_slices), which have whole copies of the model; change it, or leave it out for one copy a slice"
        )
    return copies


def sizes_for(model_config: Mapping[str, Any], topology: Topology, config: EngineConfig) -> tuple[int, ...]:
    """Of tensor_parallel_size, those that the model allows and for which a slice has the devices, ascending. config:
    its other sizes.

    Raises WeightsError when the model is not supported, and ConfigError like copies_in_slice.
    """
    model, others = build_model(model_config).config, (config.expert_parallel_size, config.attention_data_parallel_size)
    most = topology.num_devices // (math.prod(others) * copies_in_slice(config, topology))
    return tuple(size for size in possible_sizes(model, *others) if size <= most)


def _choose_devices(config: ResolvedConfig, topology: Topology) -> list[Any]:
    """The first ones of each slice, or those that device_order names."""
    size, order = config.num_devices // topology.num_slices, config.device_order
    if size > topology.num_devices:
        raise ConfigError(
            f"{MeshShape.of(config)} exceeds the {topology.num_slices * topology.num_devices} devices of "
            f"{topology.title}; lower it, or name a larger topology"
        )
    if order and topology.num_slices > 1:
        raise ConfigError("device_order names the devices of one slice; leave it out, or num_slices")
    if order:
        return pick_devices(compile_only_devices(topology), order)
    devices = compile_only_devices(_part(topology, size))
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return [device for members in slices.values() for device in members[:size]]


def _part(topology: Topology, size: int) -> Topology:
    """A smaller grid of so many devices, where there is one: libtpu aborts when it is to compile for devices of a slice
    that are not its first ones by number."""
    grid = _PARTS[topology.chip.axes].get(size // topology.chip.devices)
    if size == topology.num_devices or grid is None:
        return topology
    return dataclasses.replace(topology, grid=grid)


def _fit(runner: ModelRunner, topology: Topology, model: Decoder, dtype: str, available: int) -> MemoryPlan:
    try:
        return runner.profile_run(available)
    except ConfigError as error:
        c = runner.config
        sizes = (c.attention_data_parallel_size, c.expert_parallel_size, c.tensor_parallel_size)
        weights = _weight_bytes(model.config, sizes, runner.config.quantization, dtype)
        other = f"{error}; or use" if weights < available else "use"  # a shorter max_model_len would not help
        raise ConfigError(
            f"it does not fit {topology.title}: weights take {weights / 2**30:,.1f} of {available / 2**30:,.1f} GiB a "
            f"device; {other} {_remedy(runner, model.config, dtype, available)}"
        ) from None


def _remedy(runner: ModelRunner, model: DecoderConfig, dtype: str, available: int) -> str:
    """What would make it fit: 8-bit weights on as many devices, or more devices."""
    config, size, experts = runner.config, runner.config.tensor_parallel_size, runner.config.expert_parallel_size
    parts = config.attention_data_parallel_size
    larger = [more for more in possible_sizes(model, experts, parts) if more > size]
    choices = [(experts, size, "int8"), *((experts, more, config.quantization) for more in larger)]
    if model.moe is not None:
        apart = [more for more in range(experts + 1, model.moe.experts + 1) if model.moe.experts % (more * parts) == 0]
        choices += [(more, size, config.quantization) for more in apart if size in possible_sizes(model, more, parts)]
    for *devices, quantization in choices:
        sizes = (parts, *devices)
        try:
            plan_memory(
                config,
                _on_one(model, sizes),
                runner.layout,
                available=available,
                weights=_weight_bytes(model, sizes, quantization, dtype),
                activation_dtype_bytes=jnp.dtype(dtype).itemsize,
                cache_dtype=runner.cache_dtype,
                on_cpu=False,
            )
        except ConfigError:
            continue
        if devices == [experts, size]:
            return "quantization int8"
        return f"tensor_parallel_size {devices[1]}" if devices[1] > size else f"expert_parallel_size {devices[0]}"
    return "chips with more memory"


def _on_one(model: DecoderConfig, sizes: Sequence[int]) -> DecoderConfig:
    """What one device has of a model. sizes: of the axes of a copy."""
    mesh = AbstractMesh((1, *sizes), AXES)
    return on_one_device(with_kv_copies(model, mesh), mesh)


def _weight_bytes(model: DecoderConfig, sizes: Sequence[int], quantization: str, dtype: str) -> int:
    """On one device; with 8 bits but for the scales, which are next to nothing."""
    return param_bytes(Decoder(_on_one(model, sizes)).declaration(), "int8" if quantization == "int8" else dtype)
