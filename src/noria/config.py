"""Every option of the engine, and the one check of them.

Plain Python without jax, so that a bad option is named before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from noria.checks import describe, hints, is_a
from noria.errors import ConfigError
from noria.sampling_params import SamplingParams, StructuredOutputsParams, hint
from noria.speculative_config import SpeculativeConfig

__all__ = ["EngineConfig", "ModelLimits", "ResolvedConfig", "SamplingParams", "StructuredOutputsParams", "cache_home"]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"]
MAX_NUM_SEQS = 1 << 16  # of which the host keeps tables, with a row of max_model_len for each
MAX_SCHEDULER_STEPS = 128  # a longer burst gains nothing and keeps everybody waiting


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The facts of a model that options are checked against."""

    max_position_embeddings: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine; names are vLLM's where the meaning is the same. None means: chosen by `resolve`."""

    model: str  # a folder, a .gguf file, a Hub id, or a name that `noria pull` knows
    tokenizer: str | None = None  # a folder or file with another tokenizer than the model's own
    chat_template: str | None = None  # a file with a Jinja template, or its text, instead of the model's own
    skip_tokenizer_init: bool = False  # token ids in, token ids out: no tokenizer is needed
    revision: str | None = None  # of a Hub id
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, made from the config alone
    dtype: Dtype = "auto"  # of weights and activations; auto: the checkpoint's, float32 for packed files on a CPU
    seed: int | None = None  # of random weights and of requests that bring no seed of their own
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    tensor_parallel_size: int = 1  # devices that share the matrices, heads and vocabulary of the model
    data_parallel_size: int = 1  # copies of the model, each with a share of the requests; the one axis across slices
    attention_data_parallel_size: int = 1  # parts of a copy that split attention by request, and the rest like tensors
    expert_parallel_size: int = 1  # times as many devices, each of which has some of the experts whole
    device_order: tuple[int, ...] = ()  # ids of the devices to use, in the order of the shards; (): as they come
    nnodes: int = 1  # hosts that run the engine as one program, with a process on each; see docs/deployment.md
    node_rank: int = 0  # which of the hosts this is; 0 answers, and the others do as it says
    master_addr: str = "127.0.0.1"  # address of host 0, where the others find it
    master_port: int = 29501  # of host 0, which takes the next port, too
    distributed_timeout_seconds: int = 300  # that the hosts wait for each other at start

    max_model_len: int | None = None  # tokens of prompt and output together
    most_model_len: int | None = None  # that most requests do not exceed: their steps get by with short block tables
    max_num_seqs: int | None = None  # requests that run at the same time
    max_num_batched_tokens: int | None = None  # tokens computed in one step
    token_bucket_gap: int = 0  # 0: token buckets double; else they double up to it and then step by it
    extra_token_buckets: tuple[int, ...] = ()

    kv_cache_dtype: CacheDtype = "auto"  # auto: the dtype of the activations
    block_size: int = 16  # tokens in a cache block
    num_blocks_override: int | None = None  # size of the pool (of each rank), instead of computing it from memory
    memory_utilization: float = 0.9  # share of the device's memory the engine may take
    kv_cache_memory_bytes: int | None = None  # upper bound of the pool; None on a CPU: 1 GiB
    enable_prefix_caching: bool = True
    async_scheduling: bool = True  # plan and dispatch a step while the one before it runs
    num_scheduler_steps: int = 1  # most forward passes of a step in which everybody decodes: one loop on the device
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # priority: the lower value of a request comes first
    speculative_config: str | dict | None = None  # JSON, as in {"method": "ngram", "num_speculative_tokens": 5}

    max_logprobs: int = 20  # most log-probabilities per token that a request may ask for
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"  # processed: what was sampled from

    attention_backend: Literal["auto", "reference", "xla", "native", "pallas"] = "auto"  # auto: pallas on a TPU
    linear_backend: Literal["auto", "reference", "xla", "native", "pallas"] = "auto"  # auto: native on a CPU, if built
    quantization: Literal["auto", "none", "int8"] = "auto"  # auto: GGUF blocks stay packed; int8: one scale per output
    quantize_activations: bool = False  # to 8 bits, 32 together, where weights are packed: faster on a CPU, less exact
    compile_cache_dir: str | None = None  # "" turns the persistent compile cache off
    compile_threads: int | None = None
    programs_dir: str | None = None  # folder that noria compile --topology ... --out made: nothing is compiled then
    strict_compile: bool = False  # raise when a compile happens after warm-up

    def __post_init__(self) -> None:
        for field, kind in hints(type(self)).items():
            value = getattr(self, field)
            if field in ("extra_token_buckets", "device_order") and isinstance(value, list):
                object.__setattr__(self, field, value := tuple(value))
            if field in _PATHS and isinstance(value, os.PathLike):
                object.__setattr__(self, field, value := os.fspath(value))
            if not is_a(value, kind):
                raise ConfigError(f"{field} must be {describe(kind)}, not {value!r}")
            if field not in _WIDE:
                _check_size(field, value)
        positive = ("max_model_len", "most_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
        counts = (*_PARALLEL, "nnodes", "distributed_timeout_seconds")
        for name in (*positive, "num_blocks_override", "kv_cache_memory_bytes", "compile_threads", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_num_seqs is not None and self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(f"max_num_seqs must be at most {MAX_NUM_SEQS}, not {self.max_num_seqs}; others wait")
        if not 1 <= self.num_scheduler_steps <= MAX_SCHEDULER_STEPS:
            raise ConfigError(
                f"num_scheduler_steps must be 1 to {MAX_SCHEDULER_STEPS}, not {self.num_scheduler_steps}; "
                "1 runs the steps one by one"
            )
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.parse(self.speculative_config).text)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must fit 64 bits, not {self.seed}")
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be at least 0, not {self.max_logprobs}; name the most you need")
        if self.token_bucket_gap < 0:
            raise ConfigError(f"token_bucket_gap must be at least 0, not {self.token_bucket_gap}")
        if any(size < 2 for size in self.extra_token_buckets):
            raise ConfigError(f"extra_token_buckets must be sizes of at least 2, not {self.extra_token_buckets}")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"memory_utilization must be in (0, 1], not {self.memory_utilization}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank must be 0 to nnodes - 1 ({self.nnodes - 1}), not {self.node_rank}")
        if self.nnodes > 1 and self.num_ranks > 1:
            raise ConfigError(
                f"data_parallel_size and attention_data_parallel_size work on one host, not with nnodes {self.nnodes}; "
                "leave them out"
            )
        if not self.master_addr:
            raise ConfigError("master_addr must be the address of host 0, not empty")
        if not 1 <= self.master_port < 2**16 - 1:  # the next one is needed, too
            raise ConfigError(f"master_port must be 1 to {2**16 - 2}, not {self.master_port}")
        if self.programs_dir is not None and self.nnodes > 1:
            raise ConfigError(
                f"programs_dir: programs in a folder are for one host, not for nnodes {self.nnodes}; leave it out, and "
                "every host compiles"
            )

    @property
    def num_ranks(self) -> int:
        """Groups of devices that each keep requests of their own."""
        return self.data_parallel_size * self.attention_data_parallel_size

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.expert_parallel_size * self.tensor_parallel_size

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Like the constructor, with a helpful error for an unknown option."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name}; {hint(name, known)}")
        return cls(**options)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """speculative_config, read."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    def resolve(self, limits: ModelLimits, platform: str) -> ResolvedConfig:
        """A copy in which every None that is a size has become a number, checked against each other and the model.

        platform: "cpu", "gpu" or "tpu". Raises ConfigError.
        """
        on_cpu = platform == "cpu"
        max_model_len = self.max_model_len or limits.max_position_embeddings
        if max_model_len < 2:
            raise ConfigError(
                f"max_model_len must hold a prompt and a new token, so be at least 2, not {max_model_len}"
            )
        if max_model_len > limits.max_position_embeddings:
            raise ConfigError(
                f"max_model_len ({max_model_len}) exceeds the {limits.max_position_embeddings} positions "
                "the model was made for; lower it"
            )
        if self.most_model_len is not None:
            self._check_most_model_len(self.most_model_len, max_model_len)
        copies, ranks = self.data_parallel_size, self.num_ranks
        max_num_seqs = self.max_num_seqs or -(-copies * (64 if on_cpu else 256) // ranks) * ranks
        if max_num_seqs % ranks:
            more = -(-max_num_seqs // ranks) * ranks
            raise ConfigError(
                f"max_num_seqs ({max_num_seqs}) must be a multiple of data_parallel_size x "
                f"attention_data_parallel_size ({ranks}), which have equal shares of it; use {more}"
            )
        budget = self.max_num_batched_tokens or max(copies * (512 if on_cpu else 2048), max_num_seqs)
        if budget < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({max_num_seqs}), so that every "
                "running request can advance in each step; raise the one or lower the other"
            )
        if (speculation := self.speculation) is not None:
            speculation.check(max_model_len, min(budget, max_num_seqs * max_model_len) // ranks)
        sizes = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": min(budget, max_num_seqs * max_model_len),
            "max_logprobs": min(self.max_logprobs, limits.vocab_size),
            "compile_threads": self.compile_threads or min(8, os.cpu_count() or 1),
            "compile_cache_dir": str(cache_home() / "programs")
            if self.compile_cache_dir is None
            else self.compile_cache_dir,
        }
        return ResolvedConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | sizes)

    def _check_most_model_len(self, value: int, max_model_len: int) -> None:
        if value >= max_model_len:
            raise ConfigError(
                f"most_model_len ({value}) must be less than max_model_len ({max_model_len}), because it is what most "
                "requests get by with; lower it, or leave it out"
            )
        if self.num_ranks > 1:
            raise ConfigError(
                f"most_model_len ({value}) works with neither data_parallel_size nor attention_data_parallel_size; "
                "leave it out"
            )
        if (speculation := self.speculation) is not None and speculation.method == "eagle3":
            raise ConfigError(
                f"most_model_len ({value}) does not work with the method eagle3 of speculative_config, whose head "
                "follows steps of one shape; leave it out, or choose another method"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig whose sizes are all known and fit each other and the model. Made by EngineConfig.resolve."""

    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    compile_threads: int = 0
    compile_cache_dir: str = ""  # "" for none


def cache_home() -> Path:
    """Where models and compiled programs are kept: $NORIA_HOME, or noria/ in the user's cache folder."""
    if home := os.environ.get("NORIA_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria"


def _check_size(option: str, value: Any) -> None:
    """Sizes and places in arrays of a device have 32 bits."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and number >= 2**31:
            raise ConfigError(f"{option} must be less than 2**31, not {number}; lower it")


_WIDE = ("seed", "kv_cache_memory_bytes")  # integers that may have more than 32 bits
_PARALLEL = ("data_parallel_size", "attention_data_parallel_size", "expert_parallel_size", "tensor_parallel_size")
# Strings that may be given as a Path.
_PATHS = ("model", "tokenizer", "chat_template", "compile_cache_dir", "programs_dir")
