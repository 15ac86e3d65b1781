"""Compiling the programs of a model for TPUs that are elsewhere, into a folder that an engine there starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from noria.aot.programs import lower
from noria.aot.setup import Setup, prepare
from noria.aot.topologies import Topology
from noria.config import EngineConfig
from noria.errors import CompileError, ConfigError
from noria.runner.stored import DRAFT_FOLDER, file_name, save


def compile_into(
    folder: Path,
    config: EngineConfig,
    model_config: Mapping[str, Any],
    topology: Topology,
    num_valid_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Setup, int]:
    """config, num_valid_tokens: see prepare. Returns what was compiled for, and how many programs there are.

    Raises what prepare raises, ConfigError when the folder cannot be written or there are several slices or hosts, and
    CompileError when a program does not compile.
    """
    if topology.num_slices > 1:
        raise ConfigError("programs are compiled for one slice; each slice runs an engine of its own")
    if config.nnodes > 1:
        raise ConfigError("nnodes: programs are compiled into a folder for one host; leave it out")
    if config.compile_cache_dir:
        raise ConfigError("compile_cache_dir: the programs go to the folder of --out, not to the cache; leave it out")
    setup = prepare(config, model_config, topology, num_valid_tokens=num_valid_tokens)
    return setup, _compile_into(folder, setup, progress)


def _compile_into(folder: Path, setup: Setup, progress: Callable[[int, int], None]) -> int:
    """Returns how many programs there are, with those of a draft model, which are saved first."""
    others = 0 if setup.draft is None else _compile_into(folder / DRAFT_FOLDER, setup.draft, progress)
    jobs, mesh = setup.runner.jobs(), setup.runner.placement.mesh
    programs = {}
    with ThreadPoolExecutor(setup.config.compile_threads, thread_name_prefix="noria-compile") as pool:
        futures = {pool.submit(lambda job: lower(job, mesh).compile(), job): key for key, job in jobs.items()}
        for done, future in enumerate(as_completed(futures), start=1):
            key = futures[future]
            try:
                programs[key] = future.result()
            except Exception as error:  # the compiler's verdict, whatever its type
                pool.shutdown(wait=False, cancel_futures=True)
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise CompileError(f"{file_name(key)} does not compile for {setup.topology.name}: {reason}") from None
            progress(done, len(jobs))
    save(folder, setup.runner.origin, setup.memory.num_blocks, programs)
    return others + len(programs)
