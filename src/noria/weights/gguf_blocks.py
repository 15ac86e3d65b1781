"""Dequantization of GGUF blocks with numpy.

Each block type is a C struct of ggml (ggml-common.h); the field layouts here are those structs. A block of the simple
types has 32 elements and one scale, a "K" block has 256 elements in sub-blocks with scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

_LAYOUTS: Mapping[str, np.dtype] = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))]),
    "Q5_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", (4, 32))]),
    "Q6_K": np.dtype([("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", (2, 4, 2)), ("d", "<f2")]),
}
_PLAIN: Mapping[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


def is_packed(block_type: str) -> bool:
    return block_type in _LAYOUTS


def dequantize(block_type: str, raw: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` (float32, any shape, contiguous) from `raw` (uint8, contiguous): the blocks of as many elements.

    The arithmetic is that of ggml's dequantize_row functions, operation by operation in float32.
    """
    if out.dtype != np.float32 or not (out.flags.c_contiguous and raw.flags.c_contiguous):
        raise ValueError("out must be float32, and both arrays contiguous")
    if block_type in _PLAIN:
        out.reshape(-1)[:] = raw.reshape(-1).view(_PLAIN[block_type])
        return
    blocks = raw.reshape(-1).view(_LAYOUTS[block_type])
    with np.errstate(all="ignore"):  # a scale may be inf or nan in a damaged file
        _UNPACK[block_type](blocks, out.reshape(len(blocks), -1))


def _column(field: np.ndarray) -> np.ndarray:
    return field.astype(np.float32)[:, None]


def _nibbles(qs: np.ndarray, out: np.ndarray) -> None:
    """Low nibbles are the first 16 elements, high nibbles the last."""
    np.bitwise_and(qs, 15, out=out[:, :16])
    np.right_shift(qs, 4, out=out[:, 16:])


def _codes_4(blocks: np.ndarray) -> np.ndarray:
    codes = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks["qs"], codes)
    return codes


def _codes_5(blocks: np.ndarray) -> np.ndarray:
    """Bit j of the 32-bit little-endian word qh is the fifth bit of element j."""
    codes = np.unpackbits(blocks["qh"], axis=1, bitorder="little")  # [blocks, 32]
    codes <<= 4
    codes |= _codes_4(blocks)
    return codes


def _centred(codes: np.ndarray, zero: int, blocks: np.ndarray, out: np.ndarray) -> None:
    np.subtract(codes.view(np.int8), np.int8(zero), out=codes.view(np.int8))
    np.multiply(codes.view(np.int8), _column(blocks["d"]), out=out)


def _affine(codes: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(codes, _column(blocks["d"]), out=out)
    out += _column(blocks["m"])


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _centred(_codes_4(blocks), 8, blocks, out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _affine(_codes_4(blocks), blocks, out)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _centred(_codes_5(blocks), 16, blocks, out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _affine(_codes_5(blocks), blocks, out)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["qs"], _column(blocks["d"]), out=out)


def _sub_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minima of 8 sub-blocks, [blocks, 8] each, from 12 bytes.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; bytes 8-11 hold the low four bits of scales 4-7
    (low nibble) and minima 4-7 (high nibble), whose top two bits are those of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _affine_k(codes: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    """codes: [blocks, 8, 32]."""
    scales, minima = _sub_scales(blocks["scales"])
    grid = out.reshape(codes.shape)
    np.multiply(codes, (scales * _column(blocks["d"]))[:, :, None], out=grid)
    grid -= (minima * _column(blocks["dmin"]))[:, :, None]


def _codes_4_k(blocks: np.ndarray) -> np.ndarray:
    """Row p of qs holds sub-block 2p in its low nibbles and 2p+1 in its high ones."""
    codes = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(blocks["qs"], 15, out=codes[:, :, 0])
    np.right_shift(blocks["qs"], 4, out=codes[:, :, 1])
    return codes.reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _affine_k(_codes_4_k(blocks), blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Bit s of qh[l] is the fifth bit of element l of sub-block s."""
    codes = _codes_4_k(blocks)
    for sub in range(8):
        codes[:, sub] |= (blocks["qh"] >> sub & 1) << 4
    _affine_k(codes, blocks, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Two halves of four groups of 32 elements, one scale for 16 of them.

    The low four bits of groups 0 to 3 are the low nibbles of ql's two rows, then their high nibbles; bits 2g and 2g+1
    of qh are the top two of group g.
    """
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(blocks["ql"], 15, out=codes[:, :, :2])
    np.right_shift(blocks["ql"], 4, out=codes[:, :, 2:])
    for group in range(4):
        codes[:, :, group] |= (blocks["qh"] >> 2 * group & 3) << 4
    signed = codes.view(np.int8)
    signed -= np.int8(32)
    scales = blocks["scales"] * blocks["d"].astype(np.float32)[:, None, None, None]  # [blocks, 2, 4, 2]
    shape = (len(blocks), 2, 4, 2, 16)
    np.multiply(signed.reshape(shape), scales[..., None], out=out.reshape(shape))


_UNPACK: Mapping[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
