"""Which architectures there are. A new family is one short file with a function like these, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from noria.errors import WeightsError
from noria.models.config import DecoderConfig
from noria.models.decoder import Decoder
from noria.models.deepseek import deepseek_v2, deepseek_v3
from noria.models.gemma3 import gemma3
from noria.models.llama import llama, mistral, mixtral
from noria.models.qwen import qwen2, qwen3, qwen3_moe

ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = MappingProxyType(
    {
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "MixtralForCausalLM": mixtral,
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
        "Qwen3MoeForCausalLM": qwen3_moe,
        "Gemma3ForCausalLM": gemma3,
        "DeepseekV2ForCausalLM": deepseek_v2,
        "DeepseekV3ForCausalLM": deepseek_v3,
    }
)


def build_model(config: Mapping[str, Any]) -> Decoder:
    """The model that a checkpoint's config describes. Raises WeightsError for an architecture that is not supported."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    for name in names:
        if name in ARCHITECTURES:
            return Decoder(ARCHITECTURES[name](config))
    raise WeightsError(
        f"architecture {', '.join(map(str, names)) or '(none given)'} is not supported; supported: "
        f"{', '.join(ARCHITECTURES)}"
    )
