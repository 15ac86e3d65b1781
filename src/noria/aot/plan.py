"""The plan: will a model run on some TPUs, with how much cache, and how fast at best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.aot.estimate import Speed
from noria.aot.programs import ProgramFigures, compile_all
from noria.aot.roofline import Roofline
from noria.aot.setup import Setup, prepare
from noria.aot.topologies import Topology
from noria.config import EngineConfig, ResolvedConfig
from noria.nn.param import num_parameters
from noria.runner.memory import MemoryPlan
from noria.runner.stored import DRAFT_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """programs come with the roofline of their work, None where there is none worth speaking of. Speeds are without
    drafts. draft: of the draft model, if there is one, whose memory is not available to the model."""

    topology: Topology
    tensor_parallel_size: int
    config: ResolvedConfig
    dtype: str
    parameters: int
    memory: MemoryPlan
    programs: tuple[tuple[ProgramFigures, Roofline | None], ...]
    decode: Speed | None  # None where a program does not compile
    prefill: Speed | None
    draft: Plan | None = None

    @property
    def compiles(self) -> bool:
        own = all(figures.error is None for figures, _ in self.programs)
        return own and (self.draft is None or self.draft.compiles)

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
    dump: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """config, context, raises: see prepare. dump: a folder for the text of every compiled program."""
    return _compile(prepare(config, model_config, topology, context=context), dump, progress)


def _compile(setup: Setup, dump: Path | None, progress: Callable[[int, int], None]) -> Plan:
    draft = setup.draft and _compile(setup.draft, dump and dump / DRAFT_FOLDER, progress)
    programs = compile_all(
        setup.runner.jobs(),
        num_layers=setup.layers_in_loop,
        mesh=setup.runner.placement.mesh,
        threads=setup.config.compile_threads,
        dump=dump,
        progress=progress,
    )
    estimate = setup.estimator(programs)
    return Plan(
        topology=setup.topology,
        tensor_parallel_size=setup.config.tensor_parallel_size,
        config=setup.config,
        dtype=setup.dtype,
        parameters=num_parameters(setup.model.declaration()),
        memory=setup.memory,
        programs=tuple((each, estimate.of_program(each)) for each in programs),
        decode=estimate.decode(setup.rows),
        prefill=estimate.prefill(setup.config.max_num_batched_tokens),
        draft=draft,
    )
