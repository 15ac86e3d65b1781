"""Builds the library of native ops: python native/build.py OUTPUT [--sanitize]. Standard library only.

One compiler call for each file, since each is for another set of processor instructions, then one link.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
_AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
_X86 = {
    "linear/isa_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
    "linear/isa_avx512.cc": _AVX512,
    "linear/isa_avx512_vnni.cc": [*_AVX512, "-mavx512vnni"],
    "linear/isa_avx512_bf16.cc": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
}
_ARM = {
    "linear/isa_neon.cc": [],
    "linear/isa_neon_dot.cc": ["-march=armv8.2-a+dotprod"],
}
_COMMON = ("linear/pack.cc", "linear/ffi.cc", "runtime/cpu.cc", "runtime/exports.cc")
# Contraction would let the compiler choose where to round once instead of twice, and results would differ.
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# GCC's own intrinsics begin with undefined registers on purpose, and set off this warning.
_FLAGS.append("-Wno-maybe-uninitialized")
_FLAGS.append("-Wno-uninitialized")
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]


class BuildError(Exception):
    """Why there is no library, in one line."""


def find_compiler() -> str | None:
    """$CXX, or the first C++ compiler on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, names) if path), None)


def sources() -> dict[str, list[str]]:
    """The files to compile for this machine, and the flags of each."""
    machine = platform.machine().lower()
    special = _X86 if machine in ("x86_64", "amd64") else _ARM if machine in ("aarch64", "arm64") else {}
    return {"linear/isa_portable.cc": ["-O1"]} | special | {name: [] for name in _COMMON}


def build(output: Path, include: Path, *, sanitize: bool = False) -> None:
    """Compiles and links to `output`, which appears whole or not at all. include: the folder of XLA's FFI headers.

    Raises BuildError.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found")
    flags = [*_FLAGS, *(_SANITIZE if sanitize else ())]
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(item: tuple[str, list[str]]) -> str:
            name, special = item
            target = str(Path(folder) / (name.replace("/", "_") + ".o"))
            _run([compiler, *flags, *special, f"-I{HERE}", f"-isystem{include}", "-c", str(HERE / name), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources().items()))
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.{os.getpid()}")
        _run([compiler, *flags, "-shared", *objects, "-o", str(partial)])
        partial.replace(output)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0].strip()}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds noria's native ops.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    options = parser.parse_args()
    import jaxlib  # only here: the package's build imports this module where there may be none

    try:
        build(options.output, Path(jaxlib.__file__).parent / "include", sanitize=options.sanitize)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
