"""The rotary op in C++ (native/rotary): one pass over the heads of each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from noria.ops.rms_norm import RmsNorm


def rotary(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rope: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    *,
    q_norm: RmsNorm | None = None,
    k_norm: RmsNorm | None = None,
    path: str = "",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """See api.py. path: an instruction set of NativeLibrary.paths, "" for the best; threads: 0 for all of XLA's."""
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    call = jax.ffi.ffi_call(
        "noria_rotary", [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(k.shape, k.dtype)]
    )
    rotated_q, rotated_k = call(
        q,
        k,
        cos,
        sin,
        jnp.stack([jnp.asarray(value, jnp.int32) for value in (layer, rows, rope)]),
        *(norm.weight for norm in norms),
        normed=np.array([q_norm is not None, k_norm is not None], np.int64),
        epsilons=np.array([norm.epsilon if norm else 0 for norm in (q_norm, k_norm)], np.float32),
        offsets=np.array([norm.offset if norm else 0 for norm in (q_norm, k_norm)], np.float32),
        path=path,
        threads=np.int64(threads),
    )
    return rotated_q, rotated_k
