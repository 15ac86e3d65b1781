"""The sampling op in C++ (native/sampling): noise is made only for tokens that it could make the best."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from noria.ops.sampling.types import SamplingRows, score_width


def sample(
    logits: jax.Array,
    inputs: SamplingRows,
    banned: jax.Array,
    rows: jax.Array,
    *,
    num_tokens: int,
    path: str = "",
    threads: int = 0,
) -> jax.Array:
    """See api.py. path: an instruction set of NativeLibrary.paths, "" for the best; threads: 0 for all of XLA's."""
    call = jax.ffi.ffi_call("noria_sample", jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32))
    return call(
        logits,
        jnp.stack([inputs.temperature, inputs.top_p, inputs.min_p]),
        jnp.stack([inputs.top_k, inputs.key_high, inputs.key_low, inputs.position]),
        banned.astype(jnp.int32),
        jnp.asarray(rows, jnp.int32),
        num_tokens=np.int64(num_tokens),
        path=path,
        threads=np.int64(threads),
    )


def score(
    logits: jax.Array,
    token_ids: jax.Array,
    rows: jax.Array,
    *,
    num_top: int,
    path: str = "",
    threads: int = 0,
) -> jax.Array:
    """See api.py, and sample for path and threads."""
    call = jax.ffi.ffi_call("noria_score", jax.ShapeDtypeStruct((logits.shape[0], score_width(num_top)), jnp.int32))
    count = jnp.asarray(rows, jnp.int32)
    return call(logits, token_ids.astype(jnp.int32), count, path=path, threads=np.int64(threads))
