"""Which implementation of each op an engine gets: what was asked for, or the fastest that device and model allow."""

from __future__ import annotations

import logging

from noria.config import ResolvedConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.ops import native
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention import tpu

_log = logging.getLogger(__name__)


def choose_ops(
    config: ResolvedConfig, model: DecoderConfig, dtype: str, cache_dtype: str, platform: str, num_devices: int = 1
) -> Ops:
    """model: what one device has of it. num_devices: of its mesh. Raises ConfigError when an op cannot be had."""
    ops = Ops.choose(
        _attention(config, model, dtype, cache_dtype, platform, num_devices),
        _choice(config, "linear_backend", dtype, platform, num_devices),
        platform,
        quantize_activations=config.quantize_activations,
    )
    if config.quantize_activations and not ops.linear.packed:
        why = (
            f"it needs a CPU, not {platform}" if platform != "cpu"
            else f"it runs on one device, not on {num_devices}" if num_devices > 1
            else "it does not compute in float16" if dtype == "float16"
            else f"linear_backend is {config.linear_backend}" if config.linear_backend != "auto"
            else f"the library is {native.status()}"
        )  # fmt: skip
        raise ConfigError(f"quantize_activations needs the native linear op, and {why}; leave it out")
    return ops


def _attention(
    config: ResolvedConfig, model: DecoderConfig, dtype: str, cache_dtype: str, platform: str, num_devices: int
) -> str:
    choice = _choice(config, "attention_backend", dtype, platform, num_devices)
    if model.mla is not None and platform == "cpu":
        if choice == "native":
            raise ConfigError("attention_backend native does not compute latent attention; use auto or xla")
        choice = "xla" if choice == "auto" else choice
    if choice not in ("auto", "pallas"):
        return choice
    heads = model.num_kv_heads, model.head_dim
    why = (
        f"it needs a TPU, not {platform}" if platform != "tpu"
        else tpu.unsupported(*heads, dtype, cache_dtype, config.block_size, _num_blocks(config), model.cache_planes)
    )  # fmt: skip
    if choice == "auto":
        if why is not None and platform == "tpu":
            _log.warning("attention runs without its kernel, so slowly: it does not take %s", why)
        return "pallas" if why is None else choice
    if why is not None:
        raise ConfigError(f"attention_backend pallas cannot be used: {why}; use auto or xla")
    return choice


def _num_blocks(config: ResolvedConfig) -> int:
    return -(-config.max_model_len // config.block_size)


def _choice(config: ResolvedConfig, option: str, dtype: str, platform: str, num_devices: int = 1) -> str:
    """Of an op that has a native back end, which computes in float32 and bfloat16, on CPUs, on one device; and of the
    linear op's kernels for TPUs, which know one device, too.

    option: the name of its option. Raises ConfigError when native was asked for in vain.
    """
    choice, is_parallel = getattr(config, option), num_devices > 1
    if choice == "auto" and platform == "cpu":
        return "xla" if dtype == "float16" or is_parallel else choice
    if choice == "native":
        why = (
            f"it needs a CPU, not {platform}" if platform != "cpu"
            else "it does not compute in float16" if dtype == "float16"
            else f"it runs on one device, not on {num_devices}" if is_parallel
            else None if native.available()
            else f"the library is {native.status()}"
        )  # fmt: skip
        if why is not None:
            raise ConfigError(f"{option} native cannot be used: {why}; use auto or xla")
    if choice == "pallas" and option == "linear_backend" and (platform != "tpu" or is_parallel):
        why = f"it needs a TPU, not {platform}"
        if is_parallel:
            why = f"it runs on one device, not on {num_devices}"
        raise ConfigError(f"{option} pallas cannot be used: {why}; use auto or xla")
    return choice
