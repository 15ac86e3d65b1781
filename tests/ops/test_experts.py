"""The shared suite of the op of experts: every implementation against the reference, and bit for bit in any company."""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_weights import activations, needs_library, pack, random_source

from noria.ops.experts import ragged, reference, tiled
from noria.ops.experts.api import Choice, ExpertMatrices, Experts
from noria.ops.grouped_matmul import tpu
from noria.ops.linear import cpu, xla
from noria.ops.linear.types import DenseWeight, PackedWeight

LAYERS, EXPERTS, K, INNER, CHOSEN = 2, 5, 48, 40, 3
TILED, NATIVE = (functools.partial(tiled.experts, linear=op) for op in (xla.linear, cpu.linear))
EVERY = [
    pytest.param(TILED, "float32", id="tiled"),
    pytest.param(TILED, "int8 dense", id="tiled-int8"),
    pytest.param(ragged.experts, "float32", id="ragged"),
    pytest.param(ragged.experts, "int8 dense", id="ragged-int8"),
    *(pytest.param(NATIVE, kind, id=f"native-{kind}", marks=needs_library) for kind in ("float32", "Q8_0", "int8")),
]


def matrices(kind: str, k: int = K, inner: int = INNER, experts: int = EXPERTS) -> ExpertMatrices:
    found = []
    for seed, (out, width) in enumerate(((inner, k), (inner, k), (k, inner))):
        shape = (LAYERS, experts, out, width)
        if kind == "int8 dense":
            rng = np.random.default_rng(seed)
            codes = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
            found.append(DenseWeight(codes, jnp.asarray(rng.uniform(0.003, 0.01, shape[:-1]), jnp.float32)))
        elif kind == "float32" or kind == "bfloat16":
            values = np.random.default_rng(seed).standard_normal(shape, np.float32) / width**0.5
            found.append(DenseWeight(jnp.asarray(values, kind)))
        else:
            source, _ = random_source(kind, LAYERS * experts, out, width, seed)
            found.append(pack([kind] * len(source), list(source), width))
    return ExpertMatrices(*found)


def native_form(kind: str) -> tuple[ExpertMatrices, ExpertMatrices]:
    """What the native op takes, and the same for the reference."""
    sizes = (64, 32) if kind == "Q8_0" else (K, INNER)
    if kind != "float32":
        both = matrices(kind, *sizes)
        return both, both
    dense = matrices(kind, *sizes)
    weights = (dense.gate, dense.up, dense.down)
    flat = [np.asarray(weight.data).reshape(-1, *weight.data.shape[-2:]) for weight in weights]
    return ExpertMatrices(*(pack([kind] * len(all_), list(all_), all_.shape[-1]) for all_ in flat)), dense


def choice(rows: int, seed: int = 0, experts: int = EXPERTS, chosen: int = CHOSEN) -> Choice:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(rows)])
    return Choice(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32))


def run(op: Experts, x: Any, weights: ExpertMatrices, rows: int, chosen: Choice, **options: Any) -> np.ndarray:
    options = {"num_experts": EXPERTS, "activation": "silu"} | options
    call = jax.jit(lambda *arrays: op(*arrays, **options))
    return np.asarray(call(x, weights, np.int32(1), np.int32(rows), chosen))


@pytest.mark.parametrize(("op", "kind"), EVERY)
def test_agrees_with_the_reference(op: Experts, kind: str) -> None:
    weights, same = native_form(kind) if op is NATIVE else (matrices(kind),) * 2
    x, chosen = activations(21, 64 if kind == "Q8_0" else K), choice(21)
    want = run(reference.experts, x, same, 17, chosen)
    got = run(op, x, weights, 17, chosen)
    np.testing.assert_allclose(got[:17], want[:17], rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert np.isfinite(got).all()


@pytest.mark.parametrize("kind", ["float32", pytest.param("int8 dense", marks=pytest.mark.slow)])
def test_the_kernel_for_tpus_agrees_with_the_reference(kind: str) -> None:
    """Interpreted."""
    kernel = functools.partial(ragged.experts, multiply=functools.partial(tpu.grouped_matmul, interpret=True))
    weights, x, chosen = matrices(kind, 128, 128), activations(21, 128), choice(21)
    want, got = (run(op, x, weights, 17, chosen) for op in (reference.experts, kernel))
    np.testing.assert_allclose(got[:17], want[:17], rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert np.isfinite(got).all()


@pytest.mark.parametrize("op", [reference.experts, TILED, ragged.experts], ids=["reference", "tiled", "ragged"])
def test_devices_that_share_the_experts(op: Experts) -> None:
    """Each adds what was chosen of its own."""
    weights, x, chosen = matrices("float32"), activations(9, K), choice(9)
    whole, parts = run(op, x, weights, 9, chosen), np.zeros((9, K), np.float32)
    for first, count in ((0, 2), (2, 3)):
        some = jax.tree.map(itemgetter((slice(None), slice(first, first + count))), weights)
        parts += run(op, x, some, 9, chosen, first=first, num_experts=count)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "k", "inner", "experts", "chosen"),
    [
        ("float32", 320, 136, 16, 4),
        pytest.param("float32", K, INNER, EXPERTS, CHOSEN, marks=pytest.mark.slow),
        pytest.param("bfloat16", K, INNER, EXPERTS, CHOSEN, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("op", [TILED, pytest.param(NATIVE, marks=needs_library)], ids=["tiled", "native"])
def test_a_row_does_not_depend_on_the_others(
    op: Experts, kind: str, k: int, inner: int, experts: int, chosen: int
) -> None:
    """Whatever number of rows and of padding, and whoever chooses the same expert: equal to the last bit."""
    dense = matrices(kind, k, inner, experts)
    weights = dense
    if op is NATIVE:
        flat = [np.asarray(w.data).reshape(-1, *w.data.shape[-2:]) for w in (dense.gate, dense.up, dense.down)]
        weights = ExpertMatrices(*(pack([kind] * len(all_), list(all_), all_.shape[-1]) for all_ in flat))
    x, picks = activations(300, k, kind), choice(300, 0, experts, chosen)
    crowd = jnp.where(jnp.arange(300)[:, None] % 2 == 0, picks.ids[:1], picks.ids)  # every other row chooses alike
    picks = Choice(crowd, picks.shares)
    call = jax.jit(functools.partial(op, num_experts=experts, activation="silu"))
    layer, every = np.int32(1), np.int32(300)
    whole = np.asarray(call(x, weights, layer, every, picks))
    for size, rows in ((2, 1), (16, 3), (16, 16), (128, 100)):
        for start in (0, 150):
            part = jax.tree.map(itemgetter(slice(start, start + size)), (x, picks))
            got = np.asarray(call(part[0], weights, layer, np.int32(rows), part[1]))
            np.testing.assert_array_equal(got[:rows], whole[start : start + rows], err_msg=f"{rows} of {size}")


def test_packed_weights_need_the_tiled_op() -> None:
    packed = PackedWeight.abstract(("Q8_0",) * LAYERS * EXPERTS, 32, 64)
    with pytest.raises(TypeError, match="packed weights need the tiled op"):
        run(ragged.experts, activations(2, 64), ExpertMatrices(*[packed] * 3), 2, choice(2))
