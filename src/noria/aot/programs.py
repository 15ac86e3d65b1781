"""Compiling the programs of a model one by one, and reading what the compiler says of each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from noria.aot.hlo import Exchange, exchanges, largest_copy
from noria.aot.roofline import bytes_sent
from noria.errors import ConfigError
from noria.parallel.mesh import DATA
from noria.runner.stored import file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFigures:
    """One program on one device. flops and bytes are the compiler's count, None where it has a loop that nobody knows
    the length of; sizes are bytes."""

    name: str
    bucket: int | None  # tokens of a forward pass, requests of a sampler
    seconds: float  # to compile
    error: str | None = None  # why it does not compile
    flops: float | None = None
    bytes: float | None = None
    arguments: int = 0
    temporary: int = 0
    largest_copy: int = 0  # bytes of the largest array that it copies within the memory
    exchanges: tuple[Exchange, ...] = ()
    sent: float = 0.0  # bytes that leave the device


def compile_all(
    jobs: Mapping[Hashable, Callable[[], Any]],
    *,
    num_layers: int | None,
    mesh: Mesh,
    threads: int,
    dump: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ProgramFigures]:
    """In the order of the jobs. num_layers: of the loop that a forward pass is; None where it is several. A program
    that does not compile is one of the results. dump: a folder for the texts.

    Raises ConfigError when that folder cannot be made.
    """
    if dump is not None:
        try:
            dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"dump_hlo {dump}: {error.strerror}; choose another folder") from None
    with ThreadPoolExecutor(threads, thread_name_prefix="noria-compile") as pool:
        futures = {pool.submit(_compile, key, job, num_layers, mesh, dump): key for key, job in jobs.items()}
        found: dict[Hashable, ProgramFigures] = {}
        for done, future in enumerate(as_completed(futures), start=1):
            found[futures[future]] = future.result()
            progress(done, len(jobs))
    return [found[key] for key in jobs]


def _compile(
    key: Hashable, job: Callable[[], Any], num_layers: int | None, mesh: Mesh, dump: Path | None
) -> ProgramFigures:
    name, bucket = key if isinstance(key, tuple) else (key, None)
    begin = time.perf_counter()
    try:
        program, text = _compile_with_text(lower(job, mesh))
    except Exception as error:  # the compiler's verdict, whatever its type
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return ProgramFigures(name=str(name), bucket=bucket, seconds=time.perf_counter() - begin, error=reason)
    seconds = time.perf_counter() - begin
    if dump is not None:
        (dump / f"{file_name(key)}.txt").write_text(text, encoding="utf-8")
    cost, memory = program.cost_analysis() or {}, program.memory_analysis()
    # The compiler counts the body of a loop once. A forward pass is a loop over the layers, and next to nothing is
    # outside of it; of a burst nobody knows the length.
    times = {"forward": num_layers, "forward long": num_layers, "decode": None}.get(str(name), 1)
    exchanged = tuple(exchanges(text))
    return ProgramFigures(
        name=str(name),
        bucket=bucket,
        seconds=seconds,
        flops=None if times is None else cost.get("flops", 0.0) * times,
        bytes=None if times is None else cost.get("bytes accessed", 0.0) * times,
        arguments=memory.argument_size_in_bytes if memory else 0,
        temporary=memory.temp_size_in_bytes if memory else 0,
        largest_copy=largest_copy(text),
        exchanges=exchanged,
        sent=bytes_sent(exchanged, mesh.size // mesh.shape[DATA]),  # nothing is exchanged along the data axis
    )


def lower(job: Callable[[], Any], mesh: Mesh) -> jax.stages.Lowered:
    """Runs a job of ModelRunner.jobs for the mesh of some topology."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it which chip to compile for
        return job()


def _compile_with_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiler writes the text itself: JAX's own reader does not know every instruction that libtpu makes."""
    with tempfile.TemporaryDirectory(prefix="noria-plan-") as folder:
        program = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (path,) = Path(folder).glob("*after_optimizations.txt")
        return program, path.read_text(encoding="utf-8")
