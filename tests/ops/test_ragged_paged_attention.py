"""The shared suite: every back end and processor path against the reference, and bit for bit against itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.ops import native
from noria.ops.ragged_paged_attention import cpu, tpu
from noria.ops.ragged_paged_attention.api import (
    BACKENDS,
    CACHE_DTYPES,
    FULL_ATTENTION,
    KVCache,
    LayerAddress,
    RaggedBatch,
)

BLOCK, MAX_BLOCKS, NUM_BLOCKS, SLOTS = 16, 14, 60, 2
LIBRARY = native.load()
PATHS = () if isinstance(LIBRARY, str) else LIBRARY.paths
REFERENCE = dict(BACKENDS)["reference"]
OPS = {"xla": dict(BACKENDS)["xla"]} | {
    f"native-{path}": functools.partial(cpu.ragged_paged_attention, path=path) for path in PATHS
}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def pallas(*arguments, **options):
    """The kernel for TPUs, interpreted."""
    import interpreted_pallas

    return interpreted_pallas.ragged_paged_attention(*arguments, **options)


# Compiling what it means takes long. It promises results and not bits, and takes some dtypes only.
and_pallas = pytest.mark.parametrize(
    "op", [*OPS.values(), pytest.param(pallas, marks=pytest.mark.slow)], ids=[*OPS, "pallas"]
)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}


@functools.cache
def compiled(op, **options):
    return jax.jit(functools.partial(op, **options))


def address(window: int = FULL_ATTENTION, slot: int = 1, group: int = 0) -> LayerAddress:
    return LayerAddress(np.int32(group), np.int32(slot * NUM_BLOCKS), np.int32(window))


class World:
    """Some sequences with all their q, k, v, and a cache that already holds what is computed."""

    def __init__(
        self, lengths, *, heads=6, kv_heads=2, head_dim=32, dtype="float32", cache_dtype="float32", planes=2, seed=0
    ):
        rng = np.random.default_rng(seed)
        self.lengths, self.dtype = lengths, jnp.dtype(dtype)
        draw = lambda n, h: rng.standard_normal((n, h, head_dim), np.float32).astype(self.dtype)
        self.q = [draw(n, heads) for n in lengths]
        self.k = [draw(n, kv_heads) for n in lengths]
        self.v = [draw(n, kv_heads) for n in lengths] if planes == 2 else None  # None: the values are the keys
        ids = rng.permutation(np.arange(1, NUM_BLOCKS))
        self.tables = np.zeros((len(lengths), MAX_BLOCKS), np.int32)
        for row, n in enumerate(lengths):
            need = -(-n // BLOCK)
            self.tables[row, :need], ids = ids[:need], ids[need:]
        spec = KVCache.abstract(SLOTS * NUM_BLOCKS, BLOCK, kv_heads, head_dim, cache_dtype, planes=planes)
        # What others left behind must not matter, not even a NaN.
        nan = np.array(1 if cache_dtype == "int8" else np.nan, CACHE_DTYPES[cache_dtype])
        fill = lambda leaf: nan.view(leaf.dtype) if leaf.dtype.itemsize == nan.itemsize else 1
        self.cache = jax.tree.map(lambda leaf: np.full(leaf.shape, fill(leaf), leaf.dtype), spec)

    def batch(self, spans, num_tokens, num_rows, ended=()):
        """spans: per row (sequence, first, end) to compute now, decode rows (one token) first. ended: decode rows that
        have become padding."""
        tokens = [(row, position) for row, (_, first, end) in enumerate(spans) for position in range(first, end)]
        rows = np.full(num_tokens, num_rows, np.int32)
        positions = np.zeros(num_tokens, np.int32)
        for index, (row, position) in enumerate(tokens):
            rows[index], positions[index] = row, position
        counts = [end - first for _, first, end in spans]
        start = np.full(num_rows + 1, sum(counts), np.int32)
        start[: len(spans) + 1] = np.concatenate([[0], np.cumsum(counts)])
        lens = np.zeros(num_rows, np.int32)
        lens[: len(spans)] = [end for _, _, end in spans]
        table = np.zeros((1, num_rows, MAX_BLOCKS), np.int32)
        table[0, : len(spans)] = self.tables[[sequence for sequence, _, _ in spans]]
        for row in ended:
            rows[start[row]], positions[start[row]], lens[row] = num_rows, 0, 0
        decodes = sum(count == 1 for count in counts)
        assert all(count == 1 for count in counts[:decodes])
        arrays = (rows, positions, start, lens, table, np.array([decodes, decodes, len(spans)], np.int32))
        return RaggedBatch(*arrays)

    def run(self, op, spans, num_tokens=64, num_rows=16, layer=None, ended=(), **options):
        options.setdefault("scale", 0.2)
        gather = lambda parts: np.concatenate(
            [parts[s][first:end] for s, first, end in spans]
            + [np.ones((num_tokens - sum(e - f for _, f, e in spans), *parts[0].shape[1:]), self.dtype)]
        )
        batch = self.batch(spans, num_tokens, num_rows, ended)
        layer = layer or address()
        call = compiled(op, **options)
        values = None if self.v is None else gather(self.v)
        out, self.cache = call(gather(self.q), gather(self.k), values, self.cache, batch, layer)
        ends = np.cumsum([e - f for _, f, e in spans])
        out = np.asarray(out)
        assert np.isfinite(out.astype(np.float32)).all()
        return np.split(out[: ends[-1]], ends[:-1])


MIX = [(0, 199, 200), (1, 16, 17), (2, 0, 1), (3, 100, 133), (4, 0, 12)]
LENGTHS = [200, 17, 1, 133, 12]


def prefill(world, op, **options):
    """Fills the cache with everything that MIX counts as computed, chunk by chunk, one sequence at a time."""
    for sequence, end, _ in MIX:
        for first in range(0, end, 64):
            world.run(op, [(sequence, first, min(first + 64, end))], **options)


DTYPES = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "fp8_e4m3"),
    ("bfloat16", "fp8_e5m2"),
    ("float32", "float16"),
    ("float16", "float16"),
]
WINDOWS = [(FULL_ATTENTION, None), (24, 3.0)]


@and_pallas
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "window", "soft_cap"),
    [  # half of them by default: each dtype, each window, but not each with each
        pytest.param(*dtypes, *windows, marks=[pytest.mark.slow] * ((row + column) % 2))
        for row, dtypes in enumerate(DTYPES)
        for column, windows in enumerate(WINDOWS)
    ],
)
def test_equals_the_reference(op, dtype, cache_dtype, window, soft_cap):
    if dtype == "float16" and op is not OPS["xla"]:
        pytest.skip("native and the Pallas kernel compute in float32 and bfloat16")
    if op is pallas and tpu.unsupported(2, 32, dtype, cache_dtype, BLOCK, MAX_BLOCKS):
        pytest.skip("the Pallas kernel does not take it")
    cache, wanted = expected(dtype, cache_dtype, window, soft_cap)
    world = World(LENGTHS, dtype=dtype, cache_dtype=cache_dtype)
    world.cache = cache
    for want, found in zip(wanted, world.run(op, MIX, layer=address(window), soft_cap=soft_cap)):
        np.testing.assert_allclose(
            found.astype(np.float32), want.astype(np.float32), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@functools.cache
def expected(dtype, cache_dtype, window, soft_cap):
    """What the reference makes of MIX, and the cache before."""
    world = World(LENGTHS, dtype=dtype, cache_dtype=cache_dtype)
    options = {"layer": address(window), "soft_cap": soft_cap}
    prefill(world, REFERENCE, **options)
    return world.cache, world.run(REFERENCE, MIX, **options)


def test_the_reference_is_attention():
    """Against the textbook formula on contiguous arrays, without pages."""
    world = World([50], heads=4, kv_heads=2, head_dim=8)
    (found,) = world.run(REFERENCE, [(0, 0, 50)], layer=address(20), scale=0.3, soft_cap=4.0)
    q, k, v = (np.asarray(part[0], np.float64) for part in (world.q, world.k, world.v))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = 4.0 * np.tanh(np.einsum("qhd,khd->hqk", q, k) * 0.3 / 4.0)
    age = np.arange(50)[:, None] - np.arange(50)[None]
    weights = np.where((age >= 0) & (age < 20), np.exp(scores), 0)
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@each_op
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_cache_keeps_what_its_dtype_can(op, cache_dtype):
    world = World([40], heads=2, kv_heads=2, head_dim=32, cache_dtype=cache_dtype)
    exact = World([40], heads=2, kv_heads=2, head_dim=32)
    loose = {"float32": 0, "float16": 2e-3, "bfloat16": 2e-2, "int8": 3e-2, "fp8_e4m3": 0.1, "fp8_e5m2": 0.25}
    (found,), (expected,) = (w.run(op, [(0, 0, 40)]) for w in (world, exact))
    np.testing.assert_allclose(found, expected, atol=loose[cache_dtype])


@each_op
def test_large_values_saturate_instead_of_overflowing(op):
    world = World([4], heads=2, kv_heads=2, cache_dtype="fp8_e4m3")
    world.v = [np.full_like(world.v[0], 1e6)]
    (found,) = world.run(op, [(0, 0, 4)])
    np.testing.assert_allclose(found, 448.0, rtol=1e-5)


@each_op
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [
        pytest.param(6, 2, FULL_ATTENTION, marks=pytest.mark.slow),
        pytest.param(6, 2, 24, marks=pytest.mark.slow),
        pytest.param(4, 4, 24, marks=pytest.mark.slow),
        pytest.param(3, 1, FULL_ATTENTION, marks=pytest.mark.slow),
        (3, 1, 24),
        pytest.param(1, 1, 24, marks=pytest.mark.slow),
    ],
)
def test_a_token_does_not_depend_on_how_it_is_batched(op, heads, kv_heads, window):
    """Decode row or prefill row, alone or with others, in chunks or at once, any bucket: the same bits."""
    layer = address(window)
    shape = {"heads": heads, "kv_heads": kv_heads}
    whole = World([150, 40, 90], **shape).run(op, [(0, 0, 150), (1, 0, 40), (2, 0, 90)], num_tokens=512, layer=layer)
    world = World([150, 40, 90], **shape)
    parts = [[], [], []]
    plan = [
        [(0, 0, 37), (2, 0, 5)],
        [(2, 5, 6), (0, 37, 100)],
        [(2, 6, 7), (1, 0, 39), (0, 100, 120)],
        [(1, 39, 40), (2, 7, 8), (0, 120, 149)],
        [(0, 149, 150)],
        *([(2, position, position + 1)] for position in range(8, 90)),
    ]
    for spans in plan:
        tokens = 16 if sum(e - f for _, f, e in spans) <= 16 else 64 if len(spans) < 3 else 128
        for (sequence, _, _), out in zip(spans, world.run(op, spans, num_tokens=tokens, layer=layer)):
            parts[sequence].append(out)
    for expected, found in zip(whole, parts):
        np.testing.assert_array_equal(np.concatenate(found), expected)


@and_pallas
def test_writes_touch_only_their_own_slots_and_the_null_block(op):
    world = World(LENGTHS)
    before = np.asarray(world.cache.data)
    world.run(op, [(2, 0, 1), (4, 0, 12)])
    changed = np.argwhere(np.isfinite(np.asarray(world.cache.data)) & ~np.isfinite(before))
    blocks = {(int(b) - NUM_BLOCKS, int(s)) for b, s in changed[:, :2]}
    expected = {(int(world.tables[2, 0]), 0)} | {(int(world.tables[4, 0]), slot) for slot in range(12)}
    assert blocks - expected <= {(0, 0)}  # padding
    assert expected <= blocks


@pytest.mark.parametrize(
    "op",
    [REFERENCE, *OPS.values(), pytest.param(pallas, marks=pytest.mark.slow)],
    ids=("reference", *OPS, "pallas"),
)
@pytest.mark.parametrize("ended", [(0,), (1, 3), (4,), (0, 1, 2, 3, 4)])
def test_a_decode_row_that_has_ended_is_padding(op, ended):
    """Wherever it stands: the others get the same bits, and its place in the cache keeps what it has."""
    lengths = [150, 17, 1, 133, 40]
    spans = [(sequence, n - 1, n) for sequence, n in enumerate(lengths)]
    worlds = [World(lengths) for _ in range(2)]
    for world in worlds:
        for sequence, n in enumerate(lengths):
            if n > 1:
                world.run(REFERENCE, [(sequence, 0, n - 1)], num_tokens=256)
    before = np.asarray(worlds[1].cache.data)
    full = worlds[0].run(op, spans, num_tokens=8, num_rows=8)
    part = worlds[1].run(op, spans, num_tokens=8, num_rows=8, ended=ended)
    for row in set(range(len(lengths))) - set(ended):
        np.testing.assert_array_equal(part[row], full[row])
    place = lambda n, row: (NUM_BLOCKS + worlds[1].tables[row, (n - 1) // BLOCK], (n - 1) % BLOCK)
    for row, n in enumerate(lengths):
        after = np.asarray(worlds[1 if row in ended else 0].cache.data)[place(n, row)]
        assert np.isfinite(after).all() == (row not in ended)
        if row in ended:
            np.testing.assert_array_equal(after, before[place(n, row)])
