"""Compiles the kernels for one chip and prints what came out, a JSON object a line; see test_kernels.py.

python compile_kernels.py v6e attention|latent|grouped
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from noria.aot.devices import compile_only_devices
from noria.aot.topologies import parse_topology
from noria.ops.grouped_matmul import tpu as grouped
from noria.ops.ragged_paged_attention import tpu as attention
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.ops.ragged_paged_attention.types import LayerAddress, RaggedBatch

Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, shapes, donated arguments
ONE_CHIP = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
Shape = jax.ShapeDtypeStruct
INT = jnp.int32


def attend(
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    cache_dtype: str,
    groups: int = 1,
    planes: int = 2,
) -> Case:
    rows, blocks, block_size = 64, 20_000 if planes == 2 else 200_000, 16
    batch = RaggedBatch(
        Shape((tokens,), INT),
        Shape((tokens,), INT),
        Shape((rows + 1,), INT),
        Shape((rows,), INT),
        Shape((groups, rows, 8192), INT),
        Shape((3,), INT),
    )
    layer = LayerAddress(Shape((), INT), Shape((), INT), Shape((), INT))
    cache = Lines(kv_heads, head_dim, cache_dtype, planes).abstract(blocks, block_size)
    q, kv = (Shape((tokens, number, head_dim), jnp.dtype(dtype)) for number in (heads, kv_heads))
    op = partial(attention.ragged_paged_attention, scale=0.1, soft_cap=30.0 if head_dim == 256 else None)
    return op, (q, kv, kv if planes == 2 else None, cache, batch, layer), (3,)


def attention_cases() -> Iterator[tuple[str, Case]]:
    names = ("tokens", "heads", "kv_heads", "head_dim", "dtype", "cache_dtype")
    cases = [
        (64, 32, 8, 128, "bfloat16", "bfloat16"),
        (2048, 32, 8, 128, "bfloat16", "bfloat16"),
        *((64, 32, 8, head_dim, "bfloat16", "bfloat16") for head_dim in (64, 80, 96, 192, 256)),
        *((64, 32, 8, 128, "bfloat16", cache_dtype) for cache_dtype in attention._CACHE_DTYPES),
        (64, 8, 1, 128, "bfloat16", "int8"),
        (64, 14, 2, 64, "bfloat16", "fp8_e4m3"),
        (64, 28, 4, 128, "bfloat16", "bfloat16"),
        (512, 5, 1, 128, "bfloat16", "fp8_e5m2"),
        (64, 32, 32, 96, "bfloat16", "int8"),
        (64, 4, 2, 128, "float32", "float32"),
    ]
    for case in cases:
        yield "attention " + " ".join(map(str, case)), attend(**dict(zip(names, case)))
    yield "attention of two groups", attend(**dict(zip(names, cases[0])), groups=2)


def latent_cases() -> Iterator[tuple[str, Case]]:
    """DeepSeek's, with all heads on a device, and with those of one of eight."""
    for tokens, heads in ((64, 128), (2048, 128), (64, 16)):
        for cache_dtype in ("bfloat16", "fp8_e4m3", "int8") if tokens == 64 else ("bfloat16",):
            sizes = {"tokens": tokens, "heads": heads, "kv_heads": 1, "head_dim": 576, "planes": 1}
            yield f"latent {tokens} {heads} {cache_dtype}", attend(**sizes, dtype="bfloat16", cache_dtype=cache_dtype)


def grouped_cases() -> Iterator[tuple[str, Case]]:
    cases = [
        (512, 768, 2048, 128, "bfloat16", "bfloat16"),  # Qwen3 30B-A3B
        (16384, 2048, 768, 128, "bfloat16", "bfloat16"),
        (4096, 14336, 4096, 8, "bfloat16", "bfloat16"),  # Mixtral 8x7B
        (4096, 4096, 14336, 8, "bfloat16", "int8"),
        (64, 14336, 4096, 1, "bfloat16", "int8"),
        (64, 4096, 14336, 1, "bfloat16", "float8_e4m3fn"),
        (16, 512, 256, 1, "float32", "int8"),
    ]
    for m, n, k, groups, dtype, matrix_dtype in cases:
        shapes = [Shape((m, k), jnp.dtype(dtype)), Shape((4 * groups, n, k), jnp.dtype(matrix_dtype))]
        shapes += [Shape((groups,), INT), Shape((), INT)]
        if matrix_dtype != dtype:
            shapes.append(Shape((4 * groups, n), jnp.float32))
        yield f"grouped {m} {n} {k} {groups} {dtype} {matrix_dtype}", (grouped.grouped_matmul, tuple(shapes), ())


CASES = {"attention": attention_cases, "latent": latent_cases, "grouped": grouped_cases}


def main(chip: str, kernel: str) -> None:
    mesh = Mesh(np.array(compile_only_devices(parse_topology(ONE_CHIP[chip]))[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    for name, (function, shapes, donated) in CASES[kernel]():
        placed = jax.tree.map(lambda leaf: Shape(leaf.shape, leaf.dtype, sharding=whole), shapes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = jax.jit(function, donate_argnums=donated).lower(*placed).compile()
        memory = program.memory_analysis()
        largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        figures = {"name": name, "temporary": memory.temp_size_in_bytes, "largest": largest}
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
