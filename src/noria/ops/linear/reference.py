"""The linear op, spelled out: every weight dequantized to float32, then a plain product. The contract of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.linear.types import KINDS, LANES, DenseWeight, PackedWeight, Weight
from noria.ops.rms_norm import RmsNorm

_BITS: Mapping[str, int] = {
    "int8": 8,
    "Q8_0": 8,
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q4_K": 4,
    "Q5_K": 5,
    "Q6_K": 6,
}
_ZERO: Mapping[str, int] = {"Q8_0": 128, "Q4_0": 8, "Q5_0": 16}


def linear(
    x: jax.Array,
    weights: Sequence[Weight],
    layer: jax.Array,
    rows: jax.Array,
    *,
    norm: RmsNorm | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    post_norm: RmsNorm | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    quantize_x: bool = False,
) -> tuple[jax.Array, ...]:
    """See api.py."""
    exact = normalized(x, norm, layer).astype(jnp.float32)
    rounded = round_to_8_bits(exact) if quantize_x else exact
    results = []
    for weight, bias in zip(weights, biases or [None] * len(weights)):
        coded = isinstance(weight, PackedWeight) and weight.kinds[0] in _BITS
        values = rounded if coded else exact
        matrix = jnp.stack([unpack(weight, index) for index in range(weight.layers)])[layer]
        y = jnp.matmul(values, matrix.T, precision=lax.Precision.HIGHEST)
        results.append(y if bias is None else y + bias[layer].astype(jnp.float32))
    results = add_residual(gate(results, activation), post_norm, layer, residual)
    return tuple(y.astype(out_dtype or x.dtype) for y in results)


def argmax(
    x: jax.Array,
    weight: Weight,
    rows: jax.Array,
    *,
    num_choices: int,
    norm: RmsNorm | None = None,
    quantize_x: bool = False,
) -> jax.Array:
    """See api.py."""
    (logits,) = linear(
        x, (weight,), jnp.int32(0), rows, norm=norm, out_dtype=jnp.dtype(jnp.float32), quantize_x=quantize_x
    )
    return largest(logits, num_choices)


def embed(table: Weight, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """See api.py."""
    return jnp.take(unpack(table, 0), token_ids, axis=0, mode="clip").astype(dtype)


def normalized(x: jax.Array, norm: RmsNorm | None, layer: jax.Array) -> jax.Array:
    return x if norm is None else norm(x, layer).astype(x.dtype)


def add_residual(
    results: Sequence[jax.Array], post_norm: RmsNorm | None, layer: jax.Array, residual: jax.Array | None
) -> Sequence[jax.Array]:
    """results: float32. The only one normalized and added to, or all as they are."""
    if post_norm is None and residual is None:
        return results
    (y,) = results
    y = y if post_norm is None else post_norm(y, layer)
    return [y if residual is None else y + residual.astype(jnp.float32)]


def largest(logits: jax.Array, num_choices: int) -> jax.Array:
    """See Argmax. logits: float32 [T, V]."""
    logits = logits[:, :num_choices]
    # A maximum that is compared with itself must not be computed twice, in fusions that may round differently.
    logits = lax.optimization_barrier(logits)
    sound = jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.where(sound, jnp.argmax(logits, axis=-1), -1).astype(jnp.int32)


def gate(results: Sequence[jax.Array], activation: str | None) -> Sequence[jax.Array]:
    """With an activation: its value at the first result times the second."""
    if activation is None:
        return results
    first, second = results
    function = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[activation]  # jax's gelu is the tanh one
    return [function(first) * second]


def round_to_8_bits(x: jax.Array) -> jax.Array:
    """x [T, K] float32 as a multiple, -127 to 127, of a scale that 32 neighbours share."""
    blocks = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    top = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    integers = jnp.round(blocks * jnp.where(top > 0, 127 / top, 0))
    return (integers * (top / 127)).reshape(len(x), -1)[:, : x.shape[1]]


def unpack(weight: Weight, layer: int) -> jax.Array:
    """One layer's matrix as float32 [out, in]."""
    if isinstance(weight, DenseWeight):
        matrix = weight.data[layer].astype(jnp.float32)
        return matrix if weight.scale is None else matrix * weight.scale[layer][:, None]
    name, out, width = weight.kinds[layer], weight.out_features, weight.in_features
    kind = KINDS[name]
    tiles, blocks = -(-out // LANES), -(-width // kind.block)
    size = kind.header + blocks * kind.block_bytes
    raw = weight.data[weight.offsets[layer] :][: tiles * size].reshape(tiles, size)
    header, body = raw[:, : kind.header], raw[:, kind.header :].reshape(tiles, blocks, kind.block_bytes)
    values = _plain(name, body) if name in ("float32", "bfloat16") else _coded(name, header, body)
    return values.reshape(-1, blocks * kind.block)[:out, :width]  # values: [tiles, lanes, blocks, k]


def _plain(name: str, body: jax.Array) -> jax.Array:
    """float32 [tiles, blocks, 4, lanes] or bfloat16 [tiles, blocks, 2, lanes, 2] -> [tiles, lanes, blocks, 4]."""
    tiles, blocks, _ = body.shape
    if name == "float32":
        words = body.reshape(tiles, blocks, 4, LANES, 4)
        return jnp.moveaxis(lax.bitcast_convert_type(words, jnp.float32), 3, 1)
    words = body.reshape(tiles, blocks, 2, LANES, 2, 2)
    values = lax.bitcast_convert_type(words, jnp.bfloat16)
    return jnp.moveaxis(values, 3, 1).reshape(tiles, LANES, blocks, 4).astype(jnp.float32)


def _coded(name: str, header: jax.Array, body: jax.Array) -> jax.Array:
    """code * scale + offset -> [tiles, lanes, blocks, k]."""
    tiles, blocks, _ = body.shape
    bits, parts = _BITS[name], KINDS[name].block // 32
    scales_bytes = KINDS[name].block_bytes - parts * 64 * bits
    codes = _codes(bits, body[..., scales_bytes:].reshape(tiles, blocks, parts, bits, LANES, 4))
    if name == "int8":
        codes = codes - 128
    scale, offset = _scales(name, header, body[..., :scales_bytes])  # [tiles, blocks, sub-blocks, lanes]
    codes = codes.reshape(tiles, blocks, scale.shape[2], -1, LANES)  # [.., sub-blocks, k, lanes]
    values = codes * scale[..., None, :] + offset[..., None, :]
    return jnp.moveaxis(values.reshape(tiles, blocks, parts * 32, LANES), 3, 1)


def _codes(bits: int, body: jax.Array) -> jax.Array:
    """[..., bits, lanes, 4] bytes -> [..., 32, lanes] codes as float32."""
    if bits == 8:
        words = body
    else:
        low = body[..., :4, :, :]
        words = jnp.stack([low & 15, low >> 4], axis=-3).reshape(*body.shape[:-3], 8, LANES, 4)
        shift = jnp.arange(8, dtype=jnp.uint8)[:, None, None]
        if bits == 5:
            words |= (body[..., 4:5, :, :] >> shift & 1) << 4
        elif bits == 6:
            high = jnp.repeat(body[..., 4:6, :, :], 4, axis=-3)
            words |= (high >> shift % 4 * 2 & 3) << 4
    return jnp.moveaxis(words, -1, -2).reshape(*body.shape[:-3], 32, LANES).astype(jnp.float32)


def _scales(name: str, header: jax.Array, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of each sub-block, [tiles, blocks, sub-blocks, lanes] each."""
    tiles, blocks, _ = raw.shape

    def half(start: int) -> jax.Array:
        words = raw[..., start : start + 32].reshape(tiles, blocks, 1, LANES, 2)
        return lax.bitcast_convert_type(words, jnp.float16).astype(jnp.float32)

    if name == "int8":
        scale = lax.bitcast_convert_type(header.reshape(tiles, 1, 1, LANES, 4), jnp.float32)
        scale = jnp.broadcast_to(scale, (tiles, blocks, 1, LANES))
        return scale, jnp.zeros_like(scale)
    scale = half(0)
    if name in ("Q4_1", "Q5_1"):
        return scale, half(32)
    if name in ("Q4_K", "Q5_K"):
        small = raw[..., 64:].reshape(tiles, blocks, 2, 8, LANES).astype(jnp.float32)
        return scale * small[:, :, 0], -half(32) * small[:, :, 1]
    if name == "Q6_K":
        small = lax.bitcast_convert_type(raw[..., 32:], jnp.int8).reshape(tiles, blocks, 16, LANES)
        scale = scale * small.astype(jnp.float32)
        return scale, scale * -32
    return scale, scale * -_ZERO[name]
