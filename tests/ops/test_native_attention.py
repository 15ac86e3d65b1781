"""The native attention op in the corners that the shared suite leaves out, on every processor path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.ops import native
from noria.ops.ragged_paged_attention import cache as plain_cache
from noria.ops.ragged_paged_attention import cpu, reference
from noria.ops.ragged_paged_attention.types import (
    CACHE_DTYPES,
    FULL_ATTENTION,
    KVCache,
    LayerAddress,
    RaggedBatch,
)

LIBRARY = native.load()
PATHS = () if isinstance(LIBRARY, str) else LIBRARY.paths
pytestmark = pytest.mark.skipif(not PATHS, reason=f"native library {LIBRARY}")
each_path = pytest.mark.parametrize("path", PATHS)
FULL = np.int32(FULL_ATTENTION)


def batch_of(spans, tables, num_tokens):
    """spans: per row (first position, end); tables: [G, R, B]; a span (0, 0) is a padding row of one token."""
    rows = len(spans)
    token_rows, positions = np.full(num_tokens, rows, np.int32), np.zeros(num_tokens, np.int32)
    start, at = np.zeros(rows + 1, np.int32), 0
    for row, (first, end) in enumerate(spans):
        count = end - first
        token_rows[at : at + count] = row
        positions[at : at + count] = np.arange(first, end)
        at += max(count, 1)
        start[row + 1] = at
    lens = np.array([end for _, end in spans], np.int32)
    decodes = sum(end - first <= 1 for first, end in spans)
    return RaggedBatch(token_rows, positions, start, lens, tables, np.array([decodes, decodes, rows], np.int32))


def random_tables(rng, groups, rows, width, num_blocks):
    return np.stack(
        [rng.permutation(np.arange(1, num_blocks))[: rows * width].reshape(rows, width) for _ in range(groups)]
    )


def random_cache(rng, rows, block_size, kv_heads, head_dim, dtype="float32"):
    """Everything in it is a small number, as after other requests."""
    kind = CACHE_DTYPES[dtype]
    spec = KVCache.abstract(rows, block_size, kv_heads, head_dim, dtype)
    if dtype == "int8":
        data = rng.integers(-127, 128, spec.data.shape, np.int8)
        return KVCache(jnp.asarray(data), jnp.asarray(rng.random(spec.scale.shape, np.float32) * 0.02), dtype)
    data = rng.standard_normal(spec.data.shape, np.float32).astype(kind)
    return KVCache(jnp.asarray(data.view(spec.data.dtype)), None, dtype)


def random_qkv(rng, tokens, heads, kv_heads, head_dim, dtype="float32"):
    return [
        jnp.asarray(rng.standard_normal((tokens, h, head_dim), np.float32), dtype) for h in (heads, kv_heads, kv_heads)
    ]


@functools.cache
def compiled(op, **options):
    return jax.jit(functools.partial(op, **options))


@each_path
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [
    (2, 2, 1, 1), (3, 1, 7, 5), (4, 2, 80, 16), (2, 1, 96, 3), (8, 1, 128, 32), (2, 2, 192, 128), (4, 1, 256, 256),
    (5, 1, 33, 16), (100, 1, 16, 16),
])  # fmt: skip
def test_shapes(path, heads, kv_heads, head_dim, block_size):
    """Head sizes and block sizes of any kind, and more heads than a tile of queries holds."""
    rng = np.random.default_rng(0)
    spans = [(149, 150), (3, 4), (0, 0), (100, 160), (0, 70)]
    width = -(-160 // block_size)
    tables = random_tables(rng, 2, len(spans), width, 5 * width + 1)
    batch = batch_of(spans, tables, 140)
    qkv = random_qkv(rng, 140, heads, kv_heads, head_dim)
    cache = random_cache(rng, 2 * (5 * width + 1), block_size, kv_heads, head_dim)
    layer = LayerAddress(np.int32(1), np.int32(5 * width + 1), np.int32(90))
    options = {"scale": head_dim**-0.5, "soft_cap": 20.0}
    want, want_cache = compiled(reference.ragged_paged_attention, **options)(*qkv, cache, batch, layer)
    got, got_cache = compiled(cpu.ragged_paged_attention, path=path, **options)(*qkv, cache, batch, layer)
    valid = np.asarray(batch.token_rows) < len(spans)
    np.testing.assert_allclose(got[valid], want[valid], rtol=2e-5, atol=2e-5)
    assert not np.asarray(got)[~valid].any()
    block_zero = np.arange(len(cache.data)) != 5 * width + 1  # the null block, where the reference puts padding
    np.testing.assert_array_equal(got_cache.data[block_zero], want_cache.data[block_zero])


@each_path
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_what_is_written_has_the_bits_of_the_other_back_ends(path, dtype, cache_dtype):
    """All bfloat16 numbers, and float32 numbers beside every point where some narrow float begins to round up."""
    patterns = np.arange(65536, dtype=np.uint32) << 16
    if dtype == "float32":
        halfway = (
            np.arange(90, 145, dtype=np.uint32)[:, None] << 23 | np.arange(0, 2**23, 2**17, dtype=np.uint32)
        ).ravel()
        near = np.concatenate([halfway - 1, halfway, halfway + 1])
        random = np.random.default_rng(0).integers(0, 2**32, 65536, np.uint64).astype(np.uint32)
        patterns = np.concatenate([patterns, near, near | 0x80000000, random])
    head_dim, tokens = 64, -(-len(patterns) // 128)
    values = np.resize(patterns, tokens * 128).view(np.float32)
    if cache_dtype == "int8":  # a vector shares a scale; some have zeros only, or an infinity
        values = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
        values[:128], values[300], values[400:404], values[512:640] = 0, np.inf, (1e-42, 1e30, -1e30, 1e38), 1e-38
    k, v = jnp.asarray(values.reshape(2, tokens, 1, head_dim)).astype(dtype)
    table = np.arange(1, tokens // 16 + 2, dtype=np.int32).reshape(1, 1, -1)
    batch = batch_of([(0, tokens)], table, tokens)
    layer = LayerAddress(np.int32(0), np.int32(0), np.int32(1))
    spec = KVCache.abstract(table.size + 1, 16, 1, head_dim, cache_dtype)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
    want = jax.jit(plain_cache.write)(empty, k, v, batch, layer)
    _, got = compiled(cpu.ragged_paged_attention, path=path, scale=1.0)(k, k, v, empty, batch, layer)
    kind = CACHE_DTYPES[cache_dtype]
    got_data, want_data = (np.asarray(c.data).view(kind) for c in (got, want))
    if kind != np.int8:  # a NaN is a NaN, whichever
        nan = np.isnan(want_data.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got_data.astype(np.float32)), nan)
        got_data, want_data = got_data[~nan], want_data[~nan]
    integers = np.dtype(f"u{kind.itemsize}")
    np.testing.assert_array_equal(got_data.view(integers), want_data.view(integers))
    if got.scale is not None:
        np.testing.assert_array_equal(got.scale, want.scale)


@each_path
@pytest.mark.parametrize(
    ("cache_dtype", "head_dim"), [("bfloat16", 64), ("float32", 80), ("fp8_e4m3", 33), ("int8", 256)]
)
@pytest.mark.parametrize("window", [FULL_ATTENTION, 100])
def test_bits_do_not_depend_on_tiles_parts_and_threads(path, cache_dtype, head_dim, window):
    """A long prefill against the last tokens of it as decode rows and as a chunk, by one thread and by several."""
    rng = np.random.default_rng(2)
    length, rows = 700, 3
    tables = random_tables(rng, 1, 1, 44, 45).repeat(rows, axis=1)
    layer = LayerAddress(np.int32(0), np.int32(0), np.int32(window))
    q, k, v = random_qkv(rng, length, 6, 2, head_dim)
    cache = random_cache(rng, 45, 16, 2, head_dim, cache_dtype)
    op = functools.partial(cpu.ragged_paged_attention, scale=head_dim**-0.5, path=path)
    whole, cache = op(q, k, v, cache, batch_of([(0, length)], tables[:, :1], length), layer, threads=1)
    for threads in (1, 2, 7):
        for spans in ([(699, 700)], [(699, 700), (640, 641), (255, 256)], [(250, 700)], [(511, 517)]):
            pick = np.concatenate([np.arange(*span) for span in spans])
            batch = batch_of(spans, tables[:, : len(spans)], len(pick))
            part, after = op(q[pick], k[pick], v[pick], cache, batch, layer, threads=threads)
            np.testing.assert_array_equal(part, whole[pick], err_msg=f"{spans}, {threads} threads")
            np.testing.assert_array_equal(after.data, cache.data)


@each_path
def test_infinities_of_later_tokens_do_not_leak_into_earlier_ones(path):
    rng = np.random.default_rng(3)
    q, k, v = random_qkv(rng, 40, 4, 2, 64)
    table = np.arange(1, 4, dtype=np.int32).reshape(1, 1, 3)
    run = lambda k, v: cpu.ragged_paged_attention(
        q, k, v, random_cache(rng, 4, 16, 2, 64), batch_of([(0, 40)], table, 40),
        LayerAddress(np.int32(0), np.int32(0), FULL), scale=0.1, path=path,
    )[0]  # fmt: skip
    want = run(k, v)
    got = np.asarray(run(k.at[30].set(jnp.nan), v.at[30].set(jnp.inf)))
    np.testing.assert_array_equal(got[:30], want[:30])
    assert not np.isfinite(got[30:]).any()


def test_the_cache_is_updated_in_place_inside_a_loop():
    """No copy of it in the compiled program: its temporary memory is smaller than the cache."""
    spec = KVCache.abstract(4 * 129, 16, 2, 64, "bfloat16")
    table = np.arange(1, 17, dtype=np.int32).reshape(1, 2, 8)
    batch = batch_of([(99, 100), (0, 20)], table, 32)
    q, k, v = random_qkv(np.random.default_rng(4), 32, 4, 2, 64, "bfloat16")

    def layers(cache, q, k, v, batch):
        def step(carry, slot):
            cache, x = carry
            layer = LayerAddress(jnp.int32(0), slot * 129, jnp.int32(FULL_ATTENTION))
            out, cache = cpu.ragged_paged_attention(q + x, k, v, cache, batch, layer, scale=0.1)
            return (cache, out), None

        return jax.lax.scan(step, (cache, q), jnp.arange(4, dtype=jnp.int32))[0]

    program = jax.jit(layers, donate_argnums=0).lower(spec, q, k, v, batch).compile()
    assert program.memory_analysis().temp_size_in_bytes < spec.data.size * 2 / 8
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
    before = cache.data.unsafe_buffer_pointer()
    cache, _ = program(cache, q, k, v, batch)
    assert cache.data.unsafe_buffer_pointer() == before
    written = np.asarray(cache.data).reshape(4, 129, -1).any(axis=-1)
    assert np.flatnonzero(written.all(axis=0)).tolist() == [7, 9, 10]  # the 7th block of row 0, the first two of row 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": np.full((1, 1, 2), 9, np.int32)}, "a block lies outside the cache"),
        ({"block_tables": np.full((1, 1, 2), -1, np.int32)}, "a block lies outside the cache"),
        ({"positions": np.full(4, 40, np.int32)}, "outside its block table"),
        ({"seq_lens": np.array([3], np.int32)}, "shorter than its tokens"),
        ({"seq_lens": np.array([33], np.int32)}, "longer than its blocks"),
        ({"query_start": np.array([0, 5], np.int32)}, "query_start must rise"),
        ({"group": np.int32(1)}, "cache group does not exist"),
        ({"window": np.int32(0)}, "window must be"),
        ({"path": "sse9"}, "no path sse9"),
        ({"dtype": "float16"}, "float32 or bfloat16"),
    ],
)
def test_bad_calls_are_errors_not_crashes(change, message):
    rng = np.random.default_rng(5)
    arrays = batch_of([(0, 4)], np.ones((1, 1, 2), np.int32), 4).__dict__
    batch = RaggedBatch(**{name: change.get(name, array) for name, array in arrays.items()})
    layer = LayerAddress(change.get("group", np.int32(0)), np.int32(0), change.get("window", FULL))
    qkv = random_qkv(rng, 4, 2, 1, 16, change.get("dtype", "float32"))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            cpu.ragged_paged_attention(
                *qkv, random_cache(rng, 3, 16, 1, 16), batch, layer, scale=1.0, path=change.get("path", "")
            )
        )
