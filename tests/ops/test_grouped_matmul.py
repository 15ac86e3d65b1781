"""Grouped products: XLA's against plain ones, and the TPU kernel, interpreted, against XLA's."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from noria.ops.grouped_matmul import api, reference, tpu
from noria.ops.grouped_matmul.tpu import Sizes
from noria.ops.linear import tpu as linear_tpu
from noria.ops.linear import xla
from noria.ops.linear.types import DenseWeight

FP8 = ml_dtypes.float8_e4m3fn
COUNTS = [
    [10, 0, 23, 7],
    [0, 0, 40, 0],
    [1, 1, 1, 1],
    [8, 8, 8, 8],  # groups end with tiles
    [0, 0, 0, 0],
    [3, 0, 0, 37],
]


def problem(counts, m=40, n=256, k=128, dtype="float32", matrix_dtype=None, layers=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k), np.float32).astype(dtype)
    shape, scale = (layers * len(counts), n, k), None
    if matrix_dtype is None:
        matrices = rng.standard_normal(shape, np.float32).astype(dtype)
    else:
        scale = rng.uniform(0.5, 2, shape[:2]).astype(np.float32)
        integers = rng.integers(-127, 128, shape)
        matrices = (integers if matrix_dtype == "int8" else integers / 16).astype(matrix_dtype)
    return x, matrices, np.array(counts, np.int32), scale


def plain(x, matrices, counts, first, scale):
    group = np.repeat(np.arange(len(counts)), counts)
    wide = matrices[first:][group].astype(np.float64)
    y = np.einsum("mk,mnk->mn", x[: len(group)].astype(np.float64), wide)
    return y if scale is None else y * scale[first:][group]


def kernel(sizes=None):
    return functools.partial(tpu.grouped_matmul, sizes=sizes, interpret=True)


def agree(op, counts, *, rtol=1e-5, **options):
    x, matrices, counts, scale = problem(counts, **options)
    first = len(counts)
    found = np.asarray(op(x, matrices, counts, np.int32(first), scale))
    wanted = plain(x, matrices, counts, first, scale)
    assert found.shape == (len(x), matrices.shape[1])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=rtol, atol=rtol * 100)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("matrix_dtype", [None, "int8"])
def test_xla_is_the_plain_product(counts, matrix_dtype):
    agree(reference.grouped_matmul, counts, matrix_dtype=matrix_dtype)


@pytest.mark.parametrize("counts", COUNTS[:3])
def test_the_kernel_is_the_plain_product(counts):
    agree(kernel(Sizes(rows=8, columns=128)), counts)


@pytest.mark.slow
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("matrix_dtype", [None, "int8", FP8])
def test_the_kernel_in_all_its_ways(counts, rows, matrix_dtype):
    agree(kernel(Sizes(rows, 128)), counts, matrix_dtype=matrix_dtype)
    agree(kernel(Sizes(max(rows, 16), 256)), counts, dtype="bfloat16", matrix_dtype=matrix_dtype)


@pytest.mark.slow
def test_sizes_of_its_own_choice():
    agree(kernel(), [100, 0, 60, 300], m=500, n=384, k=256)
    agree(kernel(), [3], m=3, n=128, k=128, matrix_dtype="int8")


def test_a_matrix_is_visited_for_its_rows_alone():
    counts, tile = np.array([10, 0, 23, 7], np.int32), 8
    visits = tpu.plan_visits(jnp.asarray(counts), jnp.int32(4), 40, tile)
    number = int(visits.count[0])
    pairs = list(zip(visits.group[:number].tolist(), visits.tile[:number].tolist()))
    wanted = []
    for group, (end, count) in enumerate(zip(np.cumsum(counts), counts)):
        wanted += [(group, row // tile) for row in range(end - count, end) if row == end - count or row % tile == 0]
    assert pairs == wanted
    assert len(visits.group) == 5 + 4 - 1  # the most there can be
    assert set(zip(visits.group[number:].tolist(), visits.tile[number:].tolist())) <= {pairs[-1]}  # copy nothing


@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "matrix_bytes"),
    [
        (512, 768, 2048, 128, 2),
        (16384, 2048, 768, 128, 2),
        (4096, 14336, 4096, 8, 2),
        (4096, 4096, 14336, 8, 2),
        (64, 28672, 8192, 1, 1),
        (512, 8192, 28672, 1, 1),
        (1, 128, 128, 1, 1),
        (512, 128256, 4096, 1, 1),
    ],
)
def test_blocks_fit_fast_memory(m, n, k, groups, matrix_bytes):
    assert tpu.unsupported(n, k, 2, matrix_bytes) is None
    rows, columns = tpu.choose_sizes(m, n, k, groups, 2, matrix_bytes)
    assert n % columns == 0
    assert columns % 128 == 0
    used = 2 * rows * (2 * k + 4 * columns) + columns * k * (2 * matrix_bytes + (2 if matrix_bytes == 1 else 0))
    assert used <= 0.8 * tpu.VMEM_LIMIT
    shape = (m, n, k, groups, 2, matrix_bytes)
    declared = tpu.cost(*shape, Sizes(rows, columns))["bytes_accessed"]
    assert declared >= tpu.least_bytes(*shape)
    if groups > 1:
        assert declared < 1.75 * tpu.least_bytes(*shape)


def test_the_linear_op_leaves_many_rows_to_xla():
    shape = jax.ShapeDtypeStruct
    weight = DenseWeight(shape((1, 8192, 28672), jnp.int8), shape((1, 8192), jnp.float32))
    assert linear_tpu._fits(shape((16, 28672), jnp.bfloat16), weight)
    assert not linear_tpu._fits(shape((512, 28672), jnp.bfloat16), weight)


def test_what_the_kernel_does_not_take():
    assert "no multiples of 128" in tpu.unsupported(100, 128, 2, 2)
    assert "no multiples of 128" in tpu.unsupported(128, 100, 2, 2)
    assert "too many for fast memory" in tpu.unsupported(128, 1 << 20, 2, 2)


def test_what_it_does_not_take_is_left_to_xla():
    agree(kernel(), [3, 5], m=8, n=24, k=16)


def test_the_fastest_is_chosen():
    assert api.choose("tpu") is tpu.grouped_matmul
    assert api.choose("cpu") is api.choose("gpu") is reference.grouped_matmul


@pytest.mark.parametrize(("width", "out"), [(128, 256), (96, 40)])  # the second is XLA's
def test_the_linear_op_with_8_bit_matrices(width, out):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, width), np.float32)
    weight = DenseWeight(
        jnp.asarray(rng.integers(-127, 128, (3, out, width)).astype(np.int8)),
        jnp.asarray(rng.uniform(0.5, 2, (3, out)).astype(np.float32)),
    )
    bias = rng.standard_normal((3, out), np.float32)
    options = {"biases": [jnp.asarray(bias)] * 2, "activation": "silu"}
    arguments = (jnp.asarray(x), [weight, weight], jnp.int32(1), jnp.int32(5))
    interpreted = functools.partial(linear_tpu._product, interpret=True)
    (wanted,) = xla.linear(*arguments, **options)
    (found,) = xla.linear(*arguments, **options, product=interpreted)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-2)
