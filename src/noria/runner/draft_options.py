"""What follows for a draft model from the model that it drafts for."""

from __future__ import annotations

import dataclasses

from noria.config import EngineConfig, ResolvedConfig
from noria.errors import ConfigError
from noria.parallel.mesh import MeshShape


def draft_options(
    config: ResolvedConfig, shape: MeshShape, platform: str, available: int, num_blocks: int | None = None
) -> EngineConfig:
    """Those of the draft model's runner. config: the target's. shape: of its mesh. available: free bytes of a device.
    num_blocks: of its pool, None for as many as its share of the memory allows.

    Its pool is as the target's is by default on a CPU, and a tenth of what is free elsewhere; a sequence that finds no
    room in it gets no drafts.
    """
    options = config.speculation
    assert options is not None
    assert options.model is not None
    limit = config.kv_cache_memory_bytes or (None if platform == "cpu" else available // 10)
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    own = {
        "model": options.model,
        "revision": options.revision,
        "quantization": options.quantization,
        "quantize_activations": False,
        "data_parallel_size": shape.data,
        "attention_data_parallel_size": shape.attention_data,
        "expert_parallel_size": shape.expert,
        "tensor_parallel_size": shape.model,
        "speculative_config": None,
        "num_scheduler_steps": max(options.num_speculative_tokens - 1, 1),
        "num_blocks_override": num_blocks,
        "most_model_len": None,
        "kv_cache_memory_bytes": limit,
    }
    return EngineConfig(**{name: getattr(config, name) for name in names} | own)


def check_vocabulary(draft_size: int, vocab_size: int, needed: int) -> None:
    """That the draft model knows all tokens and no others. needed: ids that the tokenizer knows. Raises ConfigError."""
    if not needed <= draft_size <= vocab_size:
        raise ConfigError(
            f"it has a vocabulary of {draft_size} tokens, which must be no larger than the model's ({vocab_size}) and "
            f"hold all of its tokens ({needed}); choose a draft model of the same family"
        )
