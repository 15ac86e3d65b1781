"""The library of native CPU ops: where it is, whether it loads, and what this processor can run of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

LIBRARY = Path(__file__).with_name("_native") / "libnoria_ops.so"
REASON = LIBRARY.with_name("not_built.txt")  # the package's build says here why there is no library
_TARGETS = (
    "noria_linear",
    "noria_argmax",
    "noria_embed",
    "noria_rotary",
    "noria_ragged_paged_attention",
    "noria_sample",
    "noria_score",
    "noria_uninitialized",
)


@dataclass(frozen=True)
class NativeLibrary:
    """paths: names of the instruction sets that this processor can run, slowest first; "portable" is always there."""

    handle: ctypes.CDLL
    paths: tuple[str, ...]

    @property
    def best_path(self) -> str:
        return self.paths[-1]


def available() -> bool:
    return isinstance(load(), NativeLibrary)


def status() -> str:
    """One line for people: which path is active, or why there is none."""
    loaded = load()
    return loaded if isinstance(loaded, str) else f"{loaded.best_path} (of {', '.join(loaded.paths)}) in {LIBRARY}"


@functools.cache
def load(path: Path = LIBRARY) -> NativeLibrary | str:
    """The library with its custom calls registered in XLA, or the reason why there is none."""
    if not path.exists():
        reason = path.with_name(REASON.name)
        return f"not built: {reason.read_text().strip() if reason.exists() else 'the package was installed without it'}"
    try:
        handle = ctypes.CDLL(str(path))
        for name in _TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handle, name)), platform="cpu")
        _declare(handle)
    except Exception as error:  # whatever is wrong with the library, there is the XLA op to fall back on
        return f"does not load: {' '.join(str(error).split())}"
    return NativeLibrary(handle, tuple(_paths(handle)))


def uninitialized(shapes: Any) -> Any:
    """Arrays of a pytree of shapes (jax.ShapeDtypeStruct) on the CPU, whatever their memory holds; committed to the
    devices of those that name some.

    The system gives large arrays pages that cost nothing until somebody writes to them.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    make = lambda: jax.ffi.ffi_call("noria_uninitialized", leaves)()
    return jax.tree.unflatten(treedef, jax.jit(make, out_shardings=[leaf.sharding for leaf in leaves])())


def _declare(handle: ctypes.CDLL) -> None:
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    handle.noria_path.restype, handle.noria_path.argtypes = ctypes.c_char_p, [i32]
    handle.noria_packed_bytes.restype, handle.noria_packed_bytes.argtypes = i64, [i32, i64, i64]
    handle.noria_pack.restype = None
    handle.noria_pack.argtypes = [i32, pointer, i64, pointer, i64, i64, i64, i64, pointer]


def _paths(handle: ctypes.CDLL) -> Iterator[str]:
    index = 0
    while name := handle.noria_path(index):
        yield name.decode()
        index += 1
