"""What this machine can do at most: the figures that a benchmark's are a fraction of."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Instructions that CPU kernels are written for, as Linux names them on x86 and on Arm.
_INSTRUCTION_SETS = (
    *(
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
    ),
    *("asimd", "asimddp", "bf16", "i8mm", "sve"),
)
_BYTES = 256 << 20  # read at a time, at least: far beyond the caches
_BYTES_PER_CORE = 64 << 20
_MATRIX = 1536  # rows and columns
_REPETITIONS = 6


@dataclass(frozen=True)
class Processor:
    name: str
    cores: int  # that this process may use
    instruction_sets: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name} x {self.cores}"


def processor() -> Processor:
    fields = _cpu_fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(name, cores, tuple(each for each in _INSTRUCTION_SETS if each in flags))


def _cpu_fields() -> dict[str, str]:
    """Of the first processor in /proc/cpuinfo; {} where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def read_bandwidth(cores: int, num_bytes: int | None = None) -> float:
    """Bytes per second that all cores together read from memory: the best of several passes of two reductions."""
    size = (num_bytes or max(_BYTES, cores * _BYTES_PER_CORE)) // cores // 8
    arrays = [np.ones(size, np.int64) for _ in range(cores)]
    floats = [array.view(np.float64) for array in arrays]
    total = sum(array.nbytes for array in arrays)
    with ThreadPoolExecutor(cores) as pool:
        passes = (
            lambda: list(pool.map(np.bitwise_or.reduce, arrays)),
            lambda: list(pool.map(np.maximum.reduce, floats)),
        )
        return total / min(best_seconds(each) for each in passes)


def product_rate(multiply: Callable[[np.ndarray, np.ndarray], object], size: int = _MATRIX) -> float:
    """Floating-point operations per second of a product of square float32 matrices, the best of several.

    multiply: returns when the product is there. It is called once before the clock runs.
    """
    a, b = (np.random.default_rng(seed).random((size, size), np.float32) for seed in (0, 1))
    multiply(a, b)
    return 2 * size**3 / best_seconds(lambda: multiply(a, b))


def best_seconds(run: Callable[[], object], repetitions: int = _REPETITIONS) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def peak_memory_bytes() -> int:
    """The most memory this process ever had resident; 0 where the system does not say.

    On Linux getrusage() would count what the parent had when it started this process; /proc does not.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
