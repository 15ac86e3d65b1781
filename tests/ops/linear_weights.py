"""Weights and activations for the tests of the linear op."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from noria.ops import native
from noria.ops.linear import reference
from noria.ops.linear.api import KINDS, PackedWeight
from noria.weights.gguf_blocks import dequantize

LIBRARY = native.load()
PATHS = () if isinstance(LIBRARY, str) else LIBRARY.paths
GGUF = [name for name, kind in KINDS.items() if kind.source_block_bytes]
FLOATS = ("float32", "bfloat16")
K = {name: 512 if kind.block == 256 else 160 for name, kind in KINDS.items()}
# Where the half-precision scales lie in a block of a file.
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

ALL = np.int32(2**30)  # rows

needs_library = pytest.mark.skipif(not PATHS, reason=f"native library {LIBRARY}")


def random_source(kind: str, layers: int, out: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What a checkpoint would hold, [layers, out, ...], and the float32 values it stands for, [layers, out, width]."""
    rng = np.random.default_rng(seed)
    if kind in GGUF:
        size = KINDS[kind].source_block_bytes
        blocks = rng.integers(0, 256, (layers * out * width // KINDS[kind].block, size), np.uint8)
        for start in SCALES.get(kind, (0,)):
            scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
        values = np.empty((layers, out, width), np.float32)
        dequantize(kind, blocks, values)
        return blocks.reshape(layers, out, -1), values
    values = rng.standard_normal((layers, out, width), np.float32)
    if kind == "bfloat16":
        source = values.astype(ml_dtypes.bfloat16)
        return source, source.astype(np.float32)
    return values, values


def pack(kinds: list[str], sources: list[np.ndarray], width: int, **options) -> PackedWeight:
    from noria.ops.linear.pack import WeightPacker

    packer = WeightPacker(kinds, len(sources[0]), width)
    for layer, source in enumerate(sources):
        packer.write(layer, source, **options)
    return packer.finish()


@functools.cache
def packed(kind: str, out: int, width: int, layers: int = 2, seed: int = 0) -> PackedWeight:
    source, _ = random_source(kind, layers, out, width, seed)
    return pack([kind] * layers, list(source), width)


def activations(rows: int, width: int, dtype="float32", seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, width), np.float32), dtype)


@functools.cache
def matrix(kind: str, out: int, width: int, layer: int, seed: int = 0) -> np.ndarray:
    """What packed() of the same arguments stands for, float64 [out, width]."""
    unpack = jax.jit(reference.unpack, static_argnums=1)  # quicker to compile than its operations one by one
    return np.asarray(unpack(packed(kind, out, width, seed=seed), layer), np.float64)


def rounded(x: jax.Array) -> np.ndarray:
    """x as quantize_x rounds it: multiples, -127 to 127, of a scale that 32 neighbours share."""
    values = np.asarray(x, np.float32)
    blocks = np.pad(values, ((0, 0), (0, -values.shape[1] % 32))).reshape(len(values), -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    integers = np.round(blocks * (np.float32(127) / top))
    return (integers * (top / np.float32(127))).reshape(len(values), -1)[:, : values.shape[1]].astype(np.float64)


def check(got, x, weights: np.ndarray, bias=0.0, *, tolerance: float = 1e-6) -> None:
    """Errors are measured against the sum of the products' magnitudes: what rounding can be blamed for."""
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x) @ np.abs(weights).T + np.abs(bias) + 1e-9
    worst = np.max(np.abs(np.asarray(got, np.float64) - (x @ weights.T + bias)) / magnitude)
    assert worst < tolerance, worst
