"""The shared suite of the linear op: every back end and processor path against the reference, and bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_weights import (
    ALL,
    FLOATS,
    GGUF,
    LIBRARY,
    PATHS,
    SCALES,
    K,
    activations,
    check,
    matrix,
    needs_library,
    pack,
    packed,
    random_source,
    rounded,
)

from noria.ops import native
from noria.ops.linear import cpu, reference, xla
from noria.ops.linear.api import BACKENDS, KINDS, DenseWeight, PackedWeight, choose
from noria.weights.gguf_blocks import dequantize


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_in_python_are_those_of_the_library(kind):
    for out, width in ((16, 256), (197, 512), (1, 1024)):
        size = LIBRARY.handle.noria_packed_bytes(KINDS[kind].number, out, width)
        assert KINDS[kind].packed_bytes(out, width) == -(-size // 64) * 64
        if kind in GGUF and out % 16 == 0:
            assert size <= 1.03 * (out * width // KINDS[kind].block * KINDS[kind].source_block_bytes)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_packing_keeps_every_value(kind):
    source, values = random_source(kind, 2, 37, K[kind])
    weight = pack([kind] * 2, list(source), K[kind])
    for layer in range(2):
        got = np.asarray(reference.unpack(weight, layer))
        if kind == "int8":
            top = np.abs(values[layer]).max(axis=1, keepdims=True)
            assert np.all(np.abs(got - values[layer]) <= top / 127 * 0.501)
        else:
            np.testing.assert_array_equal(got, values[layer])


@needs_library
def test_packing_in_pieces_and_in_another_order():
    source, _ = random_source("Q4_1", 1, 40, 64)
    order = np.random.default_rng(0).permutation(40)
    whole = pack(["Q4_1"], [source[0][order]], 64)
    np.testing.assert_array_equal(whole.data, pack(["Q4_1"], list(source), 64, order=order).data)
    from noria.ops.linear.pack import WeightPacker

    pieces = WeightPacker(["Q4_1"], 40, 64)
    pieces.write(0, source[0][order][32:], first_row=32)
    pieces.write(0, source[0][order][:32])
    np.testing.assert_array_equal(whole.data, pieces.finish().data)


@needs_library
def test_the_packer_names_what_does_not_fit():
    from noria.ops.linear.pack import WeightPacker

    with pytest.raises(ValueError, match="no whole blocks of Q4_K"):
        WeightPacker(["Q4_K"], 16, 640)
    packer = WeightPacker(["float32"], 40, 8)
    with pytest.raises(ValueError, match=r"must be float32 \[..., 8\]"):
        packer.write(0, np.zeros((40, 9), np.float32))
    with pytest.raises(ValueError, match="no whole tiles"):
        packer.write(0, np.zeros((16, 8), np.float32), first_row=8)
    with pytest.raises(ValueError, match="order"):
        packer.write(0, np.zeros((40, 8), np.float32), order=np.full(40, 40))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 7, 40])
def test_xla_agrees_with_the_reference(rows, dtype):
    rng = np.random.default_rng(0)
    weights = [DenseWeight(jnp.asarray(rng.standard_normal((3, n, 48), np.float32), dtype)) for n in (30, 7)]
    biases = [jnp.asarray(rng.standard_normal((3, 30), np.float32), dtype), None]
    x = activations(rows, 48, dtype)
    want = reference.linear(x, weights, np.int32(2), ALL, biases=biases, out_dtype=jnp.dtype("float32"))
    got = xla.linear(x, weights, np.int32(2), ALL, biases=biases, out_dtype=jnp.dtype("float32"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
    pair = [weights[0], weights[0]]
    (got,) = xla.linear(x, pair, np.int32(1), ALL, activation="silu")
    (want,) = reference.linear(x, pair, np.int32(1), ALL, activation="silu")
    assert got.dtype == x.dtype
    # Two roundings more.
    tolerance = {"atol": 1e-3, "rtol": 1e-2} if dtype == "float32" else {"atol": 0.1, "rtol": 0.03}
    np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), **tolerance)
    np.testing.assert_array_equal(
        xla.embed(weights[0], jnp.array([3, 99, -4]), x.dtype), weights[0].data[0][jnp.array([3, 29, 0])]
    )


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_plain_product(kind):
    weight = packed(kind, 37, K[kind])
    x = activations(3, K[kind])
    (got,) = reference.linear(x, [weight], np.int32(1), ALL)
    check(got, x, matrix(kind, 37, K[kind], 1))
    if kind not in FLOATS:
        (got,) = reference.linear(x, [weight], np.int32(1), ALL, quantize_x=True)
        check(got, rounded(x), matrix(kind, 37, K[kind], 1))


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_native_is_the_plain_product(path, kind):
    """Many shapes in one program: a compile costs more than a product."""
    cases = []
    for out, width, dtype in ((197, K[kind], "float32"), (5, K[kind], "bfloat16"), (64, K[kind] * 2, "float32")):
        for rows in (1, 4, 33) if path == "portable" else (1, 2, 3, 4, 5, 7, 13, 33, 130):
            for quantize_x in (False, True)[: 1 if kind in FLOATS else 2]:
                cases.append((out, width, activations(rows, width, dtype), rows % 2, quantize_x))
    options = {"out_dtype": jnp.dtype("float32"), "path": path}

    @jax.jit
    def run(inputs, weights):
        calls = zip(cases, inputs, weights, strict=True)
        return [cpu.linear(x, [w], np.int32(case[3]), ALL, quantize_x=case[4], **options)[0] for case, x, w in calls]

    results = run([case[2] for case in cases], [packed(kind, *case[:2]) for case in cases])
    for (out, width, x, layer, quantize_x), got in zip(cases, results, strict=True):
        assert got.shape == (len(x), out)
        check(
            got,
            rounded(x) if quantize_x else x,
            matrix(kind, out, width, layer),
            tolerance=1e-5 if quantize_x else 1e-6,
        )


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [1, 3, 20, 36])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_small_and_odd_widths(kind, width, path):
    weight = packed(kind, 21, width)
    for dtype in ("float32", "bfloat16"):
        x = activations(6, width, dtype)
        options = {"out_dtype": jnp.dtype("float32"), "path": path}
        (got,) = cpu.linear(x, [weight], np.int32(1), ALL, **options)
        check(got, x, matrix(kind, 21, width, 1))
        (got,) = cpu.linear(x, [weight], np.int32(1), ALL, quantize_x=True, **options)
        check(got, x if kind in FLOATS else rounded(x), matrix(kind, 21, width, 1), tolerance=1e-5)


@needs_library
@pytest.mark.parametrize("kind", GGUF)
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_sums_of_8_bit_activations_fit(path, kind):
    """All codes at one end and all activations +-127: what sums in 16 bits must hold."""
    scales = {"Q4_K": slice(4, 16), "Q5_K": slice(4, 16), "Q6_K": slice(192, 208)}.get(kind, slice(0, 0))
    blocks = np.repeat(np.array([0x00, 0xFF, 0x80, 0x7F], np.uint8)[:, None], KINDS[kind].source_block_bytes, axis=1)
    blocks[:, scales] = 1
    for start in SCALES.get(kind, (0,)):
        blocks[:, start : start + 2] = np.array([0.25], np.float16).view(np.uint8)
    values = np.empty((1, 4, KINDS[kind].block), np.float32)
    dequantize(kind, blocks, values)
    weight = pack([kind], [blocks], KINDS[kind].block)
    x = jnp.asarray([[1.0], [-1.0]] * 3) * jnp.ones(KINDS[kind].block)
    for rows in (1, 6):
        (got,) = cpu.linear(x[-rows:], [weight], np.int32(0), ALL, quantize_x=True, path=path)
        check(got, x[-rows:], values[0].astype(np.float64))


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_weights_with_biases(path, dtype):
    """Three weights of different kinds in one call; each kind pads K in its own way."""
    names = (("Q4_1", 70), ("float32", 16), ("int8", 3))
    weights = [packed(kind, out, 160) for kind, out in names]
    rng = np.random.default_rng(2)
    biases = [jnp.asarray(rng.standard_normal((2, n), np.float32), t) for n, t in ((70, "float32"), (16, "bfloat16"))]
    for rows in (1, 9):
        x = activations(rows, 160, dtype)
        options = {"biases": [*biases, None], "path": path}
        got = cpu.linear(x, weights, np.int32(1), ALL, **options, out_dtype=jnp.dtype("float32"))
        for y, (kind, out), bias in zip(got, names, options["biases"], strict=True):
            check(y, x, matrix(kind, out, 160, 1), 0.0 if bias is None else np.asarray(bias[1], np.float64))
        narrow = cpu.linear(x, weights, np.int32(1), ALL, **options, out_dtype=jnp.dtype("bfloat16"))
        for one, other in zip(narrow, got):
            np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_K"])
def test_gate_and_up(kind, activation, path):
    weights = [packed(kind, 50, 512), packed(kind, 50, 512, seed=5)]
    biases = [jnp.linspace(-3, 3, 100).reshape(2, 50), None]
    for rows in (1, 20):
        x = activations(rows, 512) * 0.2
        (got,) = cpu.linear(x, weights, np.int32(1), ALL, biases=biases, activation=activation, path=path)
        (want,) = reference.linear(x, weights, np.int32(1), ALL, biases=biases, activation=activation)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_at_the_ends(path, activation):
    """An identity as gate: the activation function itself, from large negative numbers to large ones, and NaN."""
    values = np.array([-1e30, -200, -90, -20, -1e-20, 0, 1e-20, 3, 90, 200, 1e30, np.nan], np.float32)
    eye = pack(["float32"], [np.eye(16, dtype=np.float32)], 16)
    ones = pack(["float32"], [np.zeros((16, 16), np.float32)], 16)
    x = np.zeros((12, 16), np.float32)
    x[:, 0] = values
    bias = [None, jnp.ones((1, 16))]
    (got,) = cpu.linear(
        jnp.asarray(x[:11]), [eye, ones], np.int32(0), ALL, biases=bias, activation=activation, path=path
    )
    function = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[activation]
    np.testing.assert_allclose(got[:, 0], function(values[:11]), rtol=2e-6, atol=1e-30)
    (got,) = cpu.linear(
        jnp.asarray(x[11:]), [eye, ones], np.int32(0), ALL, biases=bias, activation=activation, path=path
    )
    assert np.isnan(got[0, 0])


@needs_library
@pytest.mark.parametrize("quantize_x", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_rows_do_not_know_each_other(path, kind, quantize_x):
    """Row t is bit-equal whatever the number of rows, cut of the batch, and number of threads."""
    if quantize_x and kind in FLOATS:
        pytest.skip("has no codes")
    weight = packed(kind, 53, K[kind] * 2)
    thorough = path == PATHS[-1] and kind in ("float32", "bfloat16", "Q6_K")
    sizes = [*range(1, 26), 41, 97, 512] if thorough else [1, 2, 3, 5, 7, 19, 97]
    for dtype in ("float32", "bfloat16")[: 2 if kind == "bfloat16" else 1]:  # two bfloat16 may have a way of their own
        x = activations(max(sizes), K[kind] * 2, dtype)

        def run(x, threads):
            options = {"out_dtype": jnp.dtype("float32"), "quantize_x": quantize_x, "path": path, "threads": threads}
            return cpu.linear(x, [weight], np.int32(1), ALL, **options)[0]

        whole = run(x, 1)
        parts = jax.jit(lambda x: [run(x[-rows:], rows % 4) for rows in sizes])(x)
        for rows, part in zip(sizes, parts):
            np.testing.assert_array_equal(part, whole[-rows:], err_msg=f"{rows} rows, {dtype}")


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_only_the_rows_that_count_are_computed(count, path):
    weight, x = packed("float32", 53, 320), activations(40, 320)
    whole = cpu.linear(x, [weight], np.int32(1), ALL, path=path)[0]
    part = np.asarray(cpu.linear(x.at[count:].set(jnp.nan), [weight], np.int32(1), np.int32(count), path=path)[0])
    np.testing.assert_array_equal(part[:count], whole[:count])
    assert not part[count:].any()


@needs_library
def test_layers_of_different_kinds_inside_a_scan():
    kinds = ["Q4_K", "Q6_K", "float32", "Q4_0"]
    sources = [random_source(kind, 1, 40, 256, seed) for seed, kind in enumerate(kinds)]
    weight = pack(kinds, [source[0] for source, _ in sources], 256)
    x = activations(5, 256)

    @jax.jit
    def run(x, weight):
        step = lambda _, layer: (None, cpu.linear(x, [weight], layer, ALL)[0])
        return jax.lax.scan(step, None, jnp.arange(4))[1]

    got = run(x, weight)
    for layer, (_, values) in enumerate(sources):
        np.testing.assert_allclose(got[layer], x @ values[0].T, rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows(kind):
    weight = packed(kind, 53, K[kind])
    ids = jnp.array([0, 52, 17, 17, 99, -3], jnp.int32)
    for dtype in ("float32", "bfloat16"):
        got = cpu.embed(weight, ids, jnp.dtype(dtype))
        want = reference.embed(weight, ids, jnp.dtype(dtype))
        np.testing.assert_allclose(
            got.astype("float32"), want.astype("float32"), rtol=2e-7 if dtype == "float32" else 0.008
        )


@needs_library
def test_bad_calls_are_errors_not_crashes():
    weight = packed("float32", 20, 160)
    x = activations(2, 160)
    with pytest.raises(Exception, match="layer does not exist"):
        jax.block_until_ready(cpu.linear(x, [weight], np.int32(2), ALL))
    with pytest.raises(Exception, match="no path sse9"):
        jax.block_until_ready(cpu.linear(x, [weight], np.int32(0), ALL, path="sse9"))
    short = PackedWeight(weight.data[:-64], weight.kinds, 20, 160)
    with pytest.raises(Exception, match="smaller than its description"):
        jax.block_until_ready(cpu.linear(x, [short], np.int32(1), ALL))
    with pytest.raises(Exception, match="float32 or bfloat16"):
        jax.block_until_ready(cpu.linear(x.astype(jnp.float16), [weight], np.int32(1), ALL))


def test_the_fastest_backend_is_chosen():
    assert choose("auto", "tpu").name == "xla"
    assert choose("auto", "cpu").name == ("native" if PATHS else "xla")
    assert [choose(backend.name, "cpu") for backend in BACKENDS] == list(BACKENDS)


def test_a_library_that_is_absent_or_broken_is_explained(tmp_path):
    missing = tmp_path / "libnoria_ops.so"
    assert native.load(missing) == "not built: the package was installed without it"
    (tmp_path / "not_built.txt").write_text("no C++ compiler was found\n")
    native.load.cache_clear()
    assert native.load(missing) == "not built: no C++ compiler was found"
    native.load.cache_clear()
    missing.write_bytes(b"no library")
    assert isinstance(native.load(missing), str)
    assert str(native.load(missing)).startswith("does not load: ")
