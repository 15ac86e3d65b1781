"""The plan: will a model run on some TPUs, with how much cache, and how fast at best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from noria.aot.devices import compile_only_devices
from noria.aot.estimate import Estimator, Speed
from noria.aot.programs import ProgramFigures, compile_all
from noria.aot.roofline import Roofline
from noria.aot.topologies import Topology
from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.models.decoder import Decoder
from noria.models.registry import build_model
from noria.nn.param import num_parameters, param_bytes
from noria.parallel.mesh import AXES, MeshShape, make_mesh, pick_devices
from noria.parallel.rules import on_one_device, possible_sizes, with_kv_copies
from noria.runner.memory import MemoryPlan, plan_memory
from noria.runner.runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """programs come with the roofline of their work, None where there is none worth speaking of."""

    topology: Topology
    tensor_parallel_size: int
    config: ResolvedConfig
    dtype: str
    parameters: int
    memory: MemoryPlan
    programs: tuple[tuple[ProgramFigures, Roofline | None], ...]
    decode: Speed | None  # None where a program does not compile
    prefill: Speed | None

    @property
    def compiles(self) -> bool:
        return all(figures.error is None for figures, _ in self.programs)

    @property
    def cache_tokens(self) -> int:
        """Of requests of max_model_len."""
        return int(self.memory.max_concurrency * self.config.max_model_len)


def make_plan(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    topology: Topology,
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """config: its sizes multiply to the devices that are used. context: tokens in the cache of each request that
    decodes; None: half of most_model_len, if that is given, or of max_model_len.

    Raises ConfigError when something is wrong with the options, or the model does not fit; WeightsError when the model
    is not supported.
    """
    model = build_model(model_config)
    if config.num_devices > topology.num_devices:
        raise ConfigError(
            f"{MeshShape.of(config)} exceeds the {topology.num_devices} devices of {topology.name}; lower it, or name "
            "a larger topology"
        )
    if config.num_ranks > 1:
        raise ConfigError(
            "noria plan knows one rank: leave data_parallel_size and attention_data_parallel_size out, which divide "
            "requests among as many"
        )
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    resolved = dataclasses.replace(config, compile_cache_dir=config.compile_cache_dir or "").resolve(limits, "tpu")
    context = (resolved.most_model_len or resolved.max_model_len) // 2 if context is None else context
    if not 0 <= context < resolved.max_model_len:
        raise ConfigError(f"context ({context}) must be below max_model_len ({resolved.max_model_len}); lower it")
    dtype = choose_dtype(config, model_config)
    devices = compile_only_devices(topology)
    runner = _runner(resolved, model, dtype, devices)
    memory = _fit(runner, topology, model, dtype)
    runner.initialize_kv_cache(memory.num_blocks, allocate=False)
    programs = compile_all(
        runner.jobs(),
        num_layers=model.config.num_layers if _is_uniform(model.config) else None,
        mesh=runner.placement.mesh,
        threads=resolved.compile_threads,
        progress=progress,
    )
    device, work = topology.chip.device, runner.work_model()
    long = runner.shape.long
    estimate = Estimator(device, resolved, runner.buckets, work, context, programs, long.num_rows if long else 0)
    fitting = int(memory.max_concurrency * resolved.max_model_len) // (context + 1)
    return Plan(
        topology=topology,
        tensor_parallel_size=config.tensor_parallel_size,
        config=resolved,
        dtype=dtype,
        parameters=num_parameters(model.declaration()),
        memory=memory,
        programs=tuple((each, estimate.of_program(each)) for each in programs),
        decode=estimate.decode(max(1, min(resolved.max_num_seqs, fitting))),
        prefill=estimate.prefill(resolved.max_num_batched_tokens),
    )


def choose_dtype(config: EngineConfig, model_config: Mapping[str, Any]) -> str:
    """As at the start on a TPU, from the config alone."""
    named = model_config.get("dtype") or model_config.get("torch_dtype")
    dtype = config.dtype if config.dtype != "auto" else "float32" if named == "float32" else "bfloat16"
    for option, value in (("dtype", dtype), ("kv_cache_dtype", config.kv_cache_dtype)):
        if value == "float16":
            raise ConfigError(f"{option} float16: a TPU does not compute in float16; use bfloat16")
    return dtype


def default_size(model_config: Mapping[str, Any], topology: Topology, expert_parallel_size: int = 1) -> int:
    """The largest tensor_parallel_size for which the topology has the devices; 1 if it has them for none.

    Raises WeightsError when the model is not supported.
    """
    model, most = build_model(model_config).config, topology.num_devices // expert_parallel_size
    return max((size for size in possible_sizes(model, expert_parallel_size) if size <= most), default=1)


def _is_uniform(model: DecoderConfig) -> bool:
    """Whether the layers are one loop, of whose body the compiler's figures are."""
    return model.num_dense_layers in (0, model.num_layers)


def _runner(config: ResolvedConfig, model: Decoder, dtype: str, devices: list[Any]) -> ModelRunner:
    chosen = pick_devices(devices, config.device_order) if config.device_order else devices[: config.num_devices]
    mesh = make_mesh(MeshShape.of(config), chosen, config.device_order)
    runner = ModelRunner(config, model, dtype, mesh, model.config.vocab_size)
    runner.describe_model(None)
    return runner


def _fit(runner: ModelRunner, topology: Topology, model: Decoder, dtype: str) -> MemoryPlan:
    available = int(topology.chip.device.memory * runner.config.memory_utilization)
    try:
        return runner.profile_run(available)
    except ConfigError as error:
        sizes = (runner.config.expert_parallel_size, runner.config.tensor_parallel_size)
        weights = _weight_bytes(model.config, sizes, runner.config.quantization, dtype)
        other = f"{error}; or use" if weights < available else "use"  # a shorter max_model_len would not help
        raise ConfigError(
            f"it does not fit {topology.name}: weights take {weights / 2**30:,.1f} of {available / 2**30:,.1f} GiB a "
            f"device; {other} {_remedy(runner, model.config, dtype, available)}"
        ) from None


def _remedy(runner: ModelRunner, model: DecoderConfig, dtype: str, available: int) -> str:
    """What would make it fit: 8-bit weights on as many devices, or more devices."""
    config, size, experts = runner.config, runner.config.tensor_parallel_size, runner.config.expert_parallel_size
    larger = [more for more in possible_sizes(model, experts) if more > size]
    choices = [(experts, size, "int8"), *((experts, more, config.quantization) for more in larger)]
    if model.moe is not None:
        apart = [more for more in range(experts + 1, model.moe.experts + 1) if model.moe.experts % more == 0]
        choices += [(more, size, config.quantization) for more in apart if size in possible_sizes(model, more)]
    for *devices, quantization in choices:
        one = _on_one(model, devices)
        try:
            plan_memory(
                config,
                one,
                runner.layout,
                available=available,
                weights=_weight_bytes(model, devices, quantization, dtype),
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
    """What one device has of a model. sizes: of the expert and the model axis."""
    mesh = AbstractMesh((1, 1, *sizes), AXES)
    return on_one_device(with_kv_copies(model, mesh), mesh)


def _weight_bytes(model: DecoderConfig, sizes: Sequence[int], quantization: str, dtype: str) -> int:
    """On one device; with 8 bits but for the scales, which are next to nothing."""
    return param_bytes(Decoder(_on_one(model, sizes)).declaration(), "int8" if quantization == "int8" else dtype)
