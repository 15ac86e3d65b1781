"""Reading a checkpoint's config: one dataclass for every decoder, and helpers for the families' files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from noria.errors import WeightsError
from noria.nn.rope import Rope, make_rope
from noria.nn.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The mixture of experts in place of the MLP, from layer `first_layer` on; those before it are dense."""

    routing: Routing
    experts: int  # held here: of one device, a part of those that are chosen from
    size: int  # intermediate size of an expert
    first_layer: int = 0
    shared_size: int = 0  # intermediate size of the MLP that all tokens share besides
    has_correction: bool = False  # of the scores, see Routing


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Sizes of multi-head latent attention, see models/mla.py."""

    query_rank: int | None  # of what queries are made of; None: of the hidden states themselves
    latent: int
    plain: int  # of a head's query and key, the part without a position
    rotated: int  # and the part with one
    value: int  # of a head
    interleaved: bool  # the two numbers that are rotated together are neighbours


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer. Per-layer tuples have num_layers entries."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_epsilon: float
    tie_word_embeddings: bool
    ropes: tuple[Rope, ...]  # the different position embeddings there are
    layer_rope: tuple[int, ...]  # which of them each layer uses
    windows: tuple[int | None, ...]  # sliding window of each layer, None for full attention
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # normalize queries and keys per head
    post_norms: bool = False  # normalize what attention and MLP yield before it is added
    norm_offset: float = 0.0  # added to every norm weight
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    moe: Moe | None = None
    mla: Mla | None = None  # then there is one KV head, of head_dim latent + rotated

    @property
    def cache_planes(self) -> int:
        """Keys and values, or what is both."""
        return 2 if self.mla is None else 1

    @property
    def num_dense_layers(self) -> int:
        """How many have an MLP of intermediate_size. They come first."""
        return self.num_layers if self.moe is None else self.moe.first_layer


class Keys:
    """A config mapping that names the key when it is missing or of the wrong type."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise WeightsError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise WeightsError(f"config.json: {name} must be a positive integer, not {value}")
        return int(value)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        return default if value is None else value

    def rope(self, head_dim: int, kind: str | None = None, theta: float = 10_000.0) -> Rope:
        """The position embedding: the older rope_theta + rope_scaling, or rope_parameters (keyed by `kind` when the
        layers differ)."""
        positions = self.integer("max_position_embeddings")
        parameters = self._mapping("rope_parameters")
        if parameters is not None:
            if kind in parameters:
                parameters = Keys(parameters)._mapping(kind) or {}
            theta = Keys(parameters).number("rope_theta", theta)
        else:
            parameters, theta = self._mapping("rope_scaling") or {}, self.number("rope_theta", theta)
        if (partial := Keys(self._config | parameters).number("partial_rotary_factor", 1.0)) != 1.0:
            raise WeightsError(f"config.json: partial_rotary_factor {partial} is not supported")
        try:
            return make_rope(head_dim, theta, parameters, positions)
        except KeyError as error:
            raise WeightsError(f"config.json: the rope parameters lack {error.args[0]}") from None

    def layer_types(self, allowed: Sequence[str]) -> list[str] | None:
        """The kind of attention of each layer; None when the config does not say."""
        types, layers = self.get("layer_types"), self.integer("num_hidden_layers")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != layers or any(kind not in allowed for kind in types):
            raise WeightsError(f"config.json: layer_types must be {layers} of {' and '.join(allowed)}, not {types}")
        return types

    def _mapping(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise WeightsError(f"config.json: {name} must be an object, not {value!r}")
        return value


def moe_routing(keys: Keys, experts: int, **own: Any) -> Routing:
    """own: sets fields of Routing. Raises WeightsError when more experts are to be chosen than there are."""
    chosen = keys.integer("num_experts_per_tok")
    if chosen > experts:
        raise WeightsError(f"config.json: num_experts_per_tok ({chosen}) exceeds the {experts} experts there are")
    return Routing(experts=experts, chosen=chosen, **own)


def dense_config(
    config: Mapping[str, Any],
    *,
    activations: Mapping[str, Literal["silu", "gelu_tanh"]],
    **own: Any,
) -> DecoderConfig:
    """The part of a config that all dense families write alike; `own` sets or overrides fields of DecoderConfig.

    activations: hidden_act values the family uses -> the function. Raises WeightsError for anything it cannot serve.
    """
    keys = Keys(config)
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers")
    kv_heads = keys.integer("num_key_value_heads", heads)
    head_dim = keys.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise WeightsError(f"config.json: num_attention_heads ({heads}) must be a multiple of {kv_heads} KV heads")
    act = keys.get("hidden_activation") or keys.get("hidden_act") or next(iter(activations))
    if act not in activations:
        raise WeightsError(f"config.json: hidden_act {act} is not supported; supported: {', '.join(activations)}")
    if keys.get("quantization_config"):
        raise WeightsError(
            "config.json: quantization_config is not supported; use the model's bfloat16 folder or a GGUF file"
        )
    fields: dict[str, Any] = {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "norm_epsilon": keys.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(keys.get("tie_word_embeddings", False)),
        "layer_rope": (0,) * layers,
        "windows": (None,) * layers,
        "activation": activations[act],
        "attention_scale": head_dim**-0.5,
    } | own
    if "ropes" not in fields:
        fields["ropes"] = (keys.rope(fields["head_dim"]),)
    return DecoderConfig(**fields)
