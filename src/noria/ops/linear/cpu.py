"""The linear op in C++ (native/linear), for packed weights.

Each result is one chain of multiply-adds in the order of K, whatever the number of rows and threads: row t of a batch
equals the same row alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.ops.linear.types import KINDS, DenseWeight, PackedWeight, Weight
from noria.ops.rms_norm import RmsNorm

_ACTIVATIONS = (None, "silu", "gelu_tanh")
MAX_WEIGHTS = 4  # in one call


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
    path: str = "",
    threads: int = 0,
) -> tuple[jax.Array, ...]:
    """See api.py. path: an instruction set of NativeLibrary.paths, "" for the best; threads: 0 for all of XLA's."""
    packed = [_packed(weight) for weight in weights]
    biases = biases or [None] * len(packed)
    operands = []
    for weight, bias in zip(packed, biases):
        operands.append(weight.data)
        if bias is not None:
            operands.append(bias)
    operands += [part.weight for part in (norm, post_norm) if part is not None]
    dtype = out_dtype or x.dtype
    results = packed if activation is None else packed[:1]
    call = jax.ffi.ffi_call(
        "noria_linear", [jax.ShapeDtypeStruct((x.shape[0], weight.out_features), dtype) for weight in results]
    )
    return tuple(
        call(
            x,
            _place(layer, rows),
            *operands,
            *([] if residual is None else [residual.astype(dtype)]),
            kinds=np.array([KINDS[kind].number for weight in packed for kind in weight.kinds], np.int64),
            offsets=np.array([offset for weight in packed for offset in weight.offsets], np.int64),
            outputs=np.array([weight.out_features for weight in packed], np.int64),
            biased=np.array([bias is not None for bias in biases], np.int64),
            activation=np.int64(_ACTIVATIONS.index(activation)),
            x8=np.bool_(quantize_x),
            **_norm_attributes(norm),
            **_norm_attributes(post_norm, "post_"),
            residual=np.bool_(residual is not None),
            path=path,
            threads=np.int64(threads),
        )
    )


def argmax(
    x: jax.Array,
    weight: Weight,
    rows: jax.Array,
    *,
    num_choices: int,
    norm: RmsNorm | None = None,
    quantize_x: bool = False,
    path: str = "",
    threads: int = 0,
) -> jax.Array:
    """See api.py, and linear for path and threads. The largest is kept while the logits are made."""
    weight = _packed(weight)
    call = jax.ffi.ffi_call("noria_argmax", jax.ShapeDtypeStruct((x.shape[0],), jnp.int32))
    return call(
        x,
        _place(0, rows),
        weight.data,
        *([] if norm is None else [norm.weight]),
        kind=np.int64(KINDS[weight.kinds[0]].number),
        outputs=np.int64(weight.out_features),
        choices=np.int64(num_choices),
        x8=np.bool_(quantize_x),
        **_norm_attributes(norm),
        path=path,
        threads=np.int64(threads),
    )


def embed(table: Weight, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """See api.py."""
    weight = _packed(table)
    call = jax.ffi.ffi_call("noria_embed", jax.ShapeDtypeStruct((len(token_ids), weight.in_features), dtype))
    kind = np.int64(KINDS[weight.kinds[0]].number)
    return call(weight.data, token_ids.astype(jnp.int32), kind=kind, outputs=np.int64(weight.out_features))


def _place(layer: jax.Array | int, rows: jax.Array) -> jax.Array:
    return jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(rows, jnp.int32)])


def _norm_attributes(norm: RmsNorm | None, prefix: str = "") -> dict[str, Any]:
    return {
        prefix + "norm": np.bool_(norm is not None),
        prefix + "epsilon": np.float32(norm.epsilon if norm else 0),
        prefix + "offset": np.float32(norm.offset if norm else 0),
    }


def _packed(weight: Weight) -> PackedWeight:
    if isinstance(weight, DenseWeight):
        raise TypeError("the native back end needs packed weights")
    return weight
