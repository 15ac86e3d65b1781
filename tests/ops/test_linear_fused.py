"""What the linear op does before and after its product: norms, residual, and the choice of the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_weights import ALL, KINDS, PATHS, K, activations, needs_library, pack, packed

from noria.ops.linear import cpu, reference, xla
from noria.ops.linear.api import DenseWeight
from noria.ops.rms_norm import RmsNorm

OUT = 53
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}


def norm(size: int, dtype: str, seed: int = 3, offset: float = 1.0) -> RmsNorm:
    weight = np.random.default_rng(seed).standard_normal((2, size)).astype(np.float32) * 0.3
    return RmsNorm(jnp.asarray(weight, dtype), 1e-3, offset)


def close(got: jax.Array, want: jax.Array, dtype: str) -> None:
    top = float(jnp.max(jnp.abs(want.astype(jnp.float32))))
    gap = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))
    assert float(jnp.max(gap)) <= TOLERANCE[dtype] * top


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_does_what_the_reference_does(dtype):
    weight = DenseWeight(jnp.asarray(np.random.default_rng(0).standard_normal((2, 30, 48), np.float32), dtype))
    x, residual = activations(7, 48, dtype), activations(7, 30, dtype, seed=4)
    parts = {"norm": norm(48, dtype), "post_norm": norm(30, dtype), "residual": residual}
    (got,) = xla.linear(x, [weight], np.int32(1), ALL, **parts)
    (want,) = reference.linear(x, [weight], np.int32(1), ALL, **parts)
    assert got.dtype == x.dtype
    close(got, want, dtype)
    options = {"num_choices": 20, "norm": norm(48, dtype)}
    np.testing.assert_array_equal(xla.argmax(x, weight, ALL, **options), reference.argmax(x, weight, ALL, **options))


def test_the_reference_spelled_out():
    weight = DenseWeight(jnp.asarray(np.random.default_rng(0).standard_normal((2, 30, 48), np.float32)))
    x, residual = activations(7, 48), activations(7, 30, seed=4)
    before, after = norm(48, "float32"), norm(30, "float32", offset=0.0)
    (got,) = reference.linear(x, [weight], np.int32(1), ALL, norm=before, post_norm=after, residual=residual)

    def normalize(values, part):
        mean = (values**2).mean(axis=-1, keepdims=True)
        return values / np.sqrt(mean + 1e-3) * (np.asarray(part.weight[1], np.float64) + part.offset)

    y = normalize(np.asarray(x, np.float64), before) @ np.asarray(weight.data[1], np.float64).T
    np.testing.assert_allclose(got, normalize(y, after) + np.asarray(residual), rtol=1e-4, atol=1e-5)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_native_fused_is_the_reference(path, kind):
    """Norm, bias, second norm, residual, in all shapes that take different ways through the code."""
    width = K[kind]
    bias = jnp.linspace(-1, 1, 2 * OUT).reshape(2, OUT)
    for dtype, rows, quantize_x in (("float32", 1, False), ("bfloat16", 3, False), ("float32", 130, True)):
        if quantize_x and kind in ("float32", "bfloat16"):
            quantize_x = False
        x, residual = activations(rows, width, dtype), activations(rows, OUT, dtype, seed=4)
        for post in (None, norm(OUT, dtype)):
            options = {"norm": norm(width, dtype), "biases": [bias], "post_norm": post, "residual": residual}
            call = (x, [packed(kind, OUT, width)], np.int32(1), ALL)
            (got,) = cpu.linear(*call, **options, quantize_x=quantize_x, path=path)
            (want,) = reference.linear(*call, **options, quantize_x=quantize_x)
            assert got.dtype == x.dtype
            # Where rounding to 8 bits falls on a tie, the last bit of the norm decides.
            close(got, want, "bfloat16" if quantize_x else dtype)


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [5, 16, 37, 320])
def test_each_part_alone(width, dtype, path):
    x, residual = activations(4, width, dtype), activations(4, OUT, dtype, seed=4)
    call = (x, [packed("float32", OUT, width)], np.int32(1), ALL)
    for options in ({"norm": norm(width, dtype, offset=0.0)}, {"post_norm": norm(OUT, dtype)}, {"residual": residual}):
        (got,) = cpu.linear(*call, **options, path=path)
        close(got, reference.linear(*call, **options)[0], dtype)


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_1"])
def test_rows_do_not_know_each_other_when_fused(kind, path):
    width = K[kind]
    for dtype in ("float32", "bfloat16"):
        x, residual = activations(200, width, dtype), activations(200, OUT, dtype, seed=4)
        options = {"norm": norm(width, dtype), "post_norm": norm(OUT, dtype), "path": path}

        def run(rows, threads, x=x, residual=residual, options=options):
            call = (x[-rows:], [packed(kind, OUT, width)], np.int32(0), ALL)
            return cpu.linear(*call, residual=residual[-rows:], threads=threads, **options)[0]

        whole = run(200, 3)
        for rows in (1, 2, 7, 16, 33, 150):
            np.testing.assert_array_equal(run(rows, rows % 3), whole[-rows:])


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_argmax_is_that_of_the_logits(kind, path):
    """Bit for bit: the same sums, the first of equals, only among the choices."""
    width, weight = K[kind], packed(kind, OUT, K[kind])
    for rows, dtype in ((1, "float32"), (6, "bfloat16"), (100, "float32")):
        x = activations(rows, width, dtype)
        part = norm(width, dtype)
        logits = cpu.linear(x, [weight], np.int32(0), ALL, norm=part, out_dtype=jnp.dtype("float32"), path=path)[0]
        for choices in (1, 16, 40, OUT):
            got = cpu.argmax(x, weight, ALL, num_choices=choices, norm=part, path=path)
            np.testing.assert_array_equal(got, np.argmax(np.asarray(logits)[:, :choices], axis=1))


@needs_library
@pytest.mark.parametrize("path", PATHS)
def test_argmax_of_equals_and_of_what_is_not_a_number(path):
    matrix = np.zeros((OUT, 8), np.float32)
    matrix[[7, 30, 52], 0] = 1.0
    matrix[:, 1] = -1.0
    matrix[20, 2] = 1.0
    weight = pack(["float32"], [matrix], 8)
    x = np.zeros((6, 8), np.float32)
    x[0, 0] = 2.0  # three equal ones
    x[1, 1] = 3.0  # all equal and negative
    x[2, 2] = np.nan
    x[3, 2] = np.inf
    x[4, 1] = np.inf  # all minus infinity
    for back_end, options in ((cpu, {"path": path}), (reference, {})):
        got = back_end.argmax(jnp.asarray(x), weight, np.int32(5), num_choices=OUT, **options)
        np.testing.assert_array_equal(got[:5], [7, 0, -1, -1, -1])


@needs_library
def test_fused_calls_that_do_not_fit_are_errors():
    weight, x = packed("float32", 20, 160), activations(2, 160)
    with pytest.raises(Exception, match="must be \\[layers, size\\]"):
        jax.block_until_ready(cpu.linear(x, [weight], np.int32(0), ALL, norm=norm(150, "float32")))
    with pytest.raises(Exception, match="like the result"):
        jax.block_until_ready(cpu.linear(x, [weight], np.int32(0), ALL, residual=activations(2, 21)))
    with pytest.raises(Exception, match="only one result"):
        jax.block_until_ready(cpu.linear(x, [weight, weight], np.int32(0), ALL, post_norm=norm(20, "float32")))
    with pytest.raises(Exception, match="some of the outputs"):
        jax.block_until_ready(cpu.argmax(x, weight, ALL, num_choices=21))
