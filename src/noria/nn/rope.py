"""Rotary position embedding (Su et al. 2021), with the frequency scalings that checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.errors import WeightsError

SUPPORTED = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class Rope:
    """inverse_frequencies: [head_dim / 2] radians per position; magnitude multiplies cosine and sine."""

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


def make_rope(head_dim: int, theta: float, scaling: dict[str, Any] | None, max_positions: int) -> Rope:
    """scaling: a config's rope_scaling (or rope_parameters) entry. Raises WeightsError for an unknown kind.

    Kinds: "linear" (Chen et al. 2023, position interpolation), "llama3" (Llama 3.1 model card's wavelength bands),
    "yarn" (Peng et al. 2023), "factors" (one divisor per frequency, as GGUF files store them).
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SUPPORTED:
        raise WeightsError(f"rope scaling {kind} is not supported; supported: {', '.join(SUPPORTED)}")
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    magnitude = 1.0
    if kind == "linear":
        base = base / scaling["factor"]
    elif kind == "llama3":
        base = _llama3(base, scaling)
    elif kind == "yarn":
        base, magnitude = _yarn(base, head_dim, theta, scaling, max_positions)
    elif kind == "factors":
        base = base / np.asarray(scaling["factors"], np.float64)
    return Rope(tuple(base.tolist()), magnitude)


def _llama3(base: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)  # in the original context
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return base * (blend + (1 - blend) / scaling["factor"])


def _yarn(
    base: np.ndarray, head_dim: int, theta: float, scaling: dict[str, Any], max_positions: int
) -> tuple[np.ndarray, float]:
    original = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor") or max_positions / original

    def dimension(turns: float) -> float:
        """The (fractional) frequency index that makes so many turns in the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        grow = lambda scale: 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
        magnitude = grow(mscale) / grow(all_dim) if mscale and all_dim else grow(1.0)
    return base * (1 - ramp) + base / factor * ramp, magnitude


def rope_tables(ropes: tuple[Rope, ...], positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, each [len(ropes), T, head_dim / 2] float32, for positions [T]."""
    frequencies = jnp.asarray([rope.inverse_frequencies for rope in ropes], jnp.float32)
    magnitudes = jnp.asarray([rope.magnitude for rope in ropes], jnp.float32)[:, None, None]
    angles = positions.astype(jnp.float32)[None, :, None] * frequencies[:, None, :]
    return jnp.cos(angles) * magnitudes, jnp.sin(angles) * magnitudes
