"""What is special to the attention kernel for TPUs: how its cache lies, its tiles, and every head size and dtype.

The shared suite runs it too, see test_ragged_paged_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ragged_paged_attention import FULL_ATTENTION, REFERENCE, World, address

from noria.ops.ragged_paged_attention import tpu, tpu_sizes
from noria.ops.ragged_paged_attention.api import CACHE_DTYPES
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes

HEAD_SIZES = (32, 64, 80, 96, 128, 192, 256)
LATENT = 576  # DeepSeek's: a latent vector and a rotated key, which 128 query heads share


def pallas(mode):
    import interpreted_pallas

    return {"fast": interpreted_pallas.ragged_paged_attention, "strict": interpreted_pallas.strict}[mode]


@pytest.mark.parametrize("dtype", tpu._CACHE_DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("planes", [1, 2])
def test_lines_give_back_what_they_were_given(dtype, head_dim, kv_heads, planes):
    lines = Lines(kv_heads, head_dim, dtype, planes)
    rng = np.random.default_rng(0)
    shape, kind = (5, kv_heads, head_dim), np.dtype(f"uint{32 // lines.packing}")
    most = 1 << (32 // lines.packing)
    values = [rng.integers(0, most, shape, np.uint64).astype(kind) for _ in range(planes)]
    words = lines.pack(*values)
    assert words.shape == (5, lines.lines, 128)
    for given, back in zip(values, lines.unpack(words), strict=True):
        np.testing.assert_array_equal(back, given)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "bytes_per_token"),
    [
        (8, 128, "bfloat16", 8 * 2 * 128 * 2),  # Llama 3.1 8B: nothing is padded
        (8, 128, "fp8_e4m3", 8 * 2 * 128),
        (8, 64, "bfloat16", 8 * 2 * 64 * 2),  # heads of 64 lie side by side
        (1, 128, "bfloat16", 2 * 128 * 2),
        (1, 128, "fp8_e5m2", 2 * 2 * 128),  # half a line is empty
        (8, 80, "bfloat16", 8 * 2 * 128 * 2),
        (4, 192, "bfloat16", 4 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token(kv_heads, head_dim, dtype, bytes_per_token):
    lines = Lines(kv_heads, head_dim, dtype)
    assert lines.bytes_per_block(16) == 16 * bytes_per_token
    spec = lines.abstract(10, 16, devices=4)
    assert spec.data.size * 4 == 4 * 10 * 16 * bytes_per_token


@pytest.mark.parametrize(("dtype", "lines"), [("float32", 8), ("bfloat16", 4), ("fp8_e4m3", 2), ("int8", 2)])
def test_lines_of_a_latent_vector(dtype, lines):
    """Five pieces of 128, rounded up to what tiles take without padding."""
    assert Lines(1, LATENT, dtype, planes=1).lines == lines


@pytest.mark.parametrize("planes", [1, 2])
def test_scales_have_places_of_their_own(planes):
    lines = Lines(3, 64, "int8", planes)
    places = np.stack(lines.scale_place(16), axis=-1).reshape(-1, 2)
    assert len({tuple(place) for place in places}) == 16 * 3 * planes
    assert places[:, 0].max() < lines.scale_lines(16)
    assert Lines(8, 128, "int8").bytes_per_block(16) == 16 * 8 * 2 * (128 + 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache_dtype", tpu._CACHE_DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 8), (4, 7), (8, 4), (16, 5), (32, 1)])
def test_tiles_fit_fast_memory(dtype, cache_dtype, head_dim, kv_heads, group):
    for tokens, width in ((1, 1), (64, 256), (2048, 8192)):
        sizes = Sizes.choose(Lines(kv_heads, head_dim, cache_dtype), group, 16, dtype, tokens, width)
        assert sizes.scratch_bytes < 0.8 * tpu_sizes.VMEM_LIMIT
        assert all(sizes.tile % block == 0 and block % 16 == 0 for block in sizes.blocks)
        assert sizes.chunk % 128 == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache_dtype", tpu._CACHE_DTYPES)
@pytest.mark.parametrize("group", [1, 16, 64, 128])
def test_tiles_of_latent_vectors_fit_fast_memory(dtype, cache_dtype, group):
    for tokens, width in ((1, 1), (64, 256), (2048, 8192)):
        sizes = Sizes.choose(Lines(1, LATENT, cache_dtype, planes=1), group, 16, dtype, tokens, width)
        assert sizes.scratch_bytes < 0.8 * tpu_sizes.VMEM_LIMIT
        assert all(sizes.tile % block == 0 and block * group <= 1024 for block in sizes.blocks)
        assert sizes.chunk % 128 == 0


def test_what_it_does_not_take():
    unsupported = tpu.unsupported
    assert unsupported(8, 128, "bfloat16", "int8", 16, 512) is None
    assert "activations in float16" in unsupported(8, 128, "float16", "int8", 16, 512)
    assert "a cache of float16" in unsupported(8, 128, "bfloat16", "float16", 16, 512)
    assert "heads of 320" in unsupported(8, 320, "bfloat16", "bfloat16", 16, 512)
    assert unsupported(1, LATENT, "bfloat16", "int8", 16, 512, planes=1) is None
    assert "heads of 1088, more than 1024" in unsupported(1, 1088, "bfloat16", "bfloat16", 16, 512, planes=1)
    assert "block_size of 24" in unsupported(8, 128, "bfloat16", "bfloat16", 24, 512)
    assert "71 KV heads in int8" in unsupported(71, 64, "bfloat16", "int8", 16, 512)
    assert "max_model_len of 100,000 blocks" in unsupported(8, 128, "bfloat16", "bfloat16", 16, 100_000)


TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def compare(
    mode,
    dtype="float32",
    cache_dtype="float32",
    *,
    head_dim=128,
    heads=6,
    kv_heads=2,
    planes=2,
    window=24,
    cap=None,
):
    """A decode row, one that has ended, and a chunk of another sequence; then all they leave in the cache."""
    shape = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "planes": planes}
    worlds = [World([40, 20, 30], dtype=dtype, cache_dtype=cache_dtype, **shape) for _ in range(2)]
    layer = address(window)
    for world in worlds:
        for sequence, end in ((0, 39), (1, 19), (2, 10)):
            world.run(REFERENCE, [(sequence, 0, end)], num_tokens=64, layer=layer)
    spans = [(0, 39, 40), (1, 19, 20), (2, 10, 22)]
    options = {"num_tokens": 16, "num_rows": 4, "layer": layer, "soft_cap": cap, "ended": (1,)}
    wanted, found = (world.run(op, spans, **options) for world, op in zip(worlds, (REFERENCE, pallas(mode))))
    for row in (0, 2):
        want, have = wanted[row].astype(np.float32), found[row].astype(np.float32)
        np.testing.assert_allclose(have, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[1].any()
    # Padding goes to the null block in the one and nowhere in the other.
    for want, have in zip(*(jax.tree.leaves(world.cache) for world in worlds)):
        used = np.delete(np.arange(len(want)), address().offset)
        np.testing.assert_array_equal(np.asarray(have)[used].view(np.uint8), np.asarray(want)[used].view(np.uint8))


def test_copies_are_waited_for(capfd):
    """The strict interpreter: copies take effect when they are waited for, and fast memory is NaN before."""
    compare("strict")
    assert "RACE" not in capfd.readouterr().out


def test_values_that_are_the_keys():
    compare("fast", "float32", "bfloat16", head_dim=160, heads=4, kv_heads=1, planes=1)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", tpu._CACHE_DTYPES)
@pytest.mark.parametrize(("head_dim", "heads"), [(24, 4), (LATENT, 16), (LATENT, 128)])
def test_latent_vectors(head_dim, heads, cache_dtype):
    compare("fast", "float32", cache_dtype, head_dim=head_dim, heads=heads, kv_heads=1, planes=1)


@pytest.mark.slow
def test_latent_vectors_strictly(capfd):
    compare("strict", "bfloat16", "bfloat16", head_dim=LATENT, heads=16, kv_heads=1, planes=1)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow
def test_eight_bits_with_heads_side_by_side():
    compare("fast", cache_dtype="int8", head_dim=64, heads=8, kv_heads=4, window=FULL_ATTENTION, cap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", tpu._CACHE_DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_head_sizes_and_dtypes(head_dim, cache_dtype):
    compare("fast", "bfloat16", cache_dtype, head_dim=head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (5, 1), (7, 1), (4, 4), (12, 3), (16, 8)])
@pytest.mark.parametrize(("head_dim", "cache_dtype"), [(64, "fp8_e4m3"), (128, "int8"), (64, "float32")])
def test_numbers_of_heads(heads, kv_heads, head_dim, cache_dtype):
    compare("fast", "float32", cache_dtype, head_dim=head_dim, heads=heads, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_strictly(cache_dtype, capfd):
    compare("strict", "bfloat16", cache_dtype, head_dim=64, kv_heads=3, cap=2.0)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_many_tiles_and_chunks(mode, monkeypatch, capfd):
    """In tiles so small that rows have several, whose blocks see different chunks."""
    monkeypatch.setattr(tpu_sizes, "_CHUNK", 128)
    monkeypatch.setattr(tpu_sizes, "_ROWS", 96)
    sizes = Sizes.choose(Lines(2, 32, "float32"), 3, 16, "float32", 256, 14)
    assert (sizes.tile, sizes.blocks, sizes.chunk) == (16, (16,), 128)
    op = functools.partial(pallas(mode))  # compiled with these sizes
    for window in (24, FULL_ATTENTION):
        worlds = [World([200, 17, 133]) for _ in range(2)]
        for spans in ([(0, 0, 150), (2, 0, 50)], [(1, 0, 1), (0, 150, 199), (2, 50, 133)], [(0, 199, 200), (1, 1, 17)]):
            results = [
                world.run(each, spans, num_tokens=256, num_rows=4, layer=address(window))
                for world, each in zip(worlds, (REFERENCE, op))
            ]
            for want, have in zip(*results):
                np.testing.assert_allclose(have, want, atol=2e-5, rtol=2e-5)
    assert "RACE" not in capfd.readouterr().out


def test_values_of_other_dtypes_are_converted_as_the_contract_says():
    """Large values saturate, as in the other back ends: what is packed comes from the same functions."""
    lines = Lines(1, 128, "fp8_e4m3")
    new = jnp.full((1, 1, 128), 1e6, jnp.bfloat16)
    words, _ = tpu._new_words((new, -new), lines)
    k, v = (np.asarray(bits).view(CACHE_DTYPES["fp8_e4m3"]).astype(np.float32) for bits in lines.unpack(words))
    assert (k == 448).all()
    assert (v == -448).all()
