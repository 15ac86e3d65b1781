"""Dequantization equals the reference of the `gguf` package, element by element, on random blocks."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from noria.weights.gguf_blocks import dequantize, is_packed
from noria.weights.gguf_file import BLOCK_TYPES

TYPES = {name: (elements, size) for name, elements, size in BLOCK_TYPES.values()}


def random_blocks(kind: str, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, TYPES[kind][1]), np.uint8)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equals_the_reference_on_random_bytes(kind, count):
    # random bytes give every nibble, and scales that are huge, tiny, infinite or not a number
    elements, _ = TYPES[kind]
    raw = random_blocks(kind, count, seed=count)
    out = np.full((count, elements), 7.0, np.float32)
    dequantize(kind, raw, out)
    if kind == "BF16":  # gguf reads it by shifting, which the next line would also do
        expected = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(all="ignore"):
            expected = quants.dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(out, expected.reshape(out.shape))


@pytest.mark.parametrize("kind", TYPES)
def test_sizes_are_those_of_ggml(kind):
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == TYPES[kind]
    assert is_packed(kind) == (TYPES[kind][0] > 1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_values_come_back_close(kind):
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    packed = quants.quantize(values, GGMLQuantizationType[kind])
    out = np.empty_like(values)
    dequantize(kind, packed, out)
    bits = 8 if kind == "Q8_0" else int(kind[1])
    assert np.abs(out - values).max() < 8 / 2**bits


def test_four_bit_block_by_hand():
    # scale 0.5, minimum -1; byte j is element j (low) and element j + 16 (high)
    block = np.concatenate([np.array([0.5, -1.0], "<f2").view(np.uint8), np.arange(16, dtype=np.uint8) * 16 + 15])
    out = np.empty(32, np.float32)
    dequantize("Q4_1", block, out)
    np.testing.assert_array_equal(out, [6.5] * 16 + [0.5 * j - 1 for j in range(16)])
