"""Builds the native ops: python native/build.py [--fuzz] OUTPUT. Standard library only.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Sets of instructions: their flags, and the macro that a compiler defines where it may use them.
_PATHS = {
    "x86_64": {
        "avx2": (_AVX2, "__AVX2__"),
        "avx512_vnni": (_AVX512, "__AVX512VNNI__"),
        "avx512_bf16": ((*_AVX512, "-mavx512bf16"), "__AVX512BF16__"),
    },
    "aarch64": {
        "neon": ((), "__ARM_NEON"),
        "neon_dot": (("-march=armv8.2-a+dotprod",), "__ARM_FEATURE_DOTPROD"),
    },
}
_ROOMS = ("linear", "attention", "sampling")  # each has its kernels in an isa_<path>.cc
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_COMMON = (*(f"{room}/isa_portable.cc" for room in _ROOMS), "linear/pack.cc", "runtime/cpu.cc")
_LIBRARY = ("linear/ffi.cc", "attention/ffi.cc", "rotary/ffi.cc", "sampling/ffi.cc", *_COMMON, "runtime/exports.cc")
_FUZZ = (*_COMMON, "fuzz/linear.cc", "fuzz/attention.cc", "fuzz/sampling.cc", "fuzz/main.cc")
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # else the compiler chooses where to round once instead of twice, and results would differ
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC's own intrinsics begin with undefined registers
)
_SANITIZE = (
    *("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "-DNORIA_INLINE=",  # one large function full of checks takes minutes to compile
)


class BuildError(Exception):
    """Why there is no library, in one line."""


def find_compiler() -> str | None:
    """$CXX, or the first C++ compiler on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, names) if path), None)


def build_library(output: Path, include: Path) -> None:
    """The shared library that XLA calls. include: the folder of XLA's FFI headers. Raises BuildError."""
    _build(output, _LIBRARY, (f"-isystem{include}",), ("-shared",), _paths())


def build_fuzz(output: Path) -> None:
    """A program that runs random shapes through all paths this machine can run, under sanitizers.

    Raises BuildError.
    """
    macros = _run([_compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    paths = {name: (flags, macro) for name, (flags, macro) in _paths().items() if f"#define {macro} " in macros}
    _build(output, _FUZZ, _SANITIZE, (), paths)


def _paths() -> dict[str, tuple[tuple[str, ...], str]]:
    return _PATHS.get(_MACHINES.get(platform.machine().lower(), ""), {})


def _build(
    output: Path,
    names: Sequence[str],
    flags: Sequence[str],
    link_flags: Sequence[str],
    paths: dict[str, tuple[tuple[str, ...], str]],
) -> None:
    """Compiles and links to `output`, which appears whole or not at all."""
    command = [_compiler(), *_FLAGS, *flags]
    own_flags = {f"{room}/isa_{name}.cc": paths[name][0] for room in _ROOMS for name in reversed(paths)}
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(name: str) -> str | None:
            target = str(Path(folder) / (name.replace("/", "_") + ".o"))
            try:
                _run([*command, *own_flags.get(name, ()), f"-I{HERE}", "-c", str(HERE / name), "-o", target])
            except BuildError as error:
                if name not in own_flags:
                    raise
                print(f"left out {name}: {error}", file=sys.stderr)  # the compiler is older than the instructions
                return None
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the longest first
            objects = [target for target in pool.map(compile_one, [*own_flags, *names]) if target]
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.{os.getpid()}")
        _run([*command, *link_flags, *objects, "-o", str(partial)])
        partial.replace(output)


def _compiler() -> str:
    if compiler := find_compiler():
        return compiler
    raise BuildError("no C++ compiler was found")


def _run(command: Sequence[str]) -> str:
    """The command's standard output. What it warns of is shown."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0].strip()}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds noria's native ops.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--fuzz", action="store_true", help="the fuzz program instead of the library")
    options = parser.parse_args()
    try:
        if options.fuzz:
            build_fuzz(options.output)
        else:
            import jaxlib  # only here: what imports this module need not have it

            build_library(options.output, Path(jaxlib.__file__).parent / "include")
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
