"""Which implementation of each op an engine uses: chosen once at start, passed to the programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from noria.ops.experts import api as experts
from noria.ops.linear import api as linear
from noria.ops.ragged_paged_attention import api as attention
from noria.ops.rotary import api as rotary
from noria.ops.sampling import api as sampling


@dataclass(frozen=True)
class Ops:
    attention: attention.RaggedPagedAttention
    linear: linear.Backend
    rotary: rotary.Rotary
    sampling: sampling.Backend
    experts: experts.Experts
    cache_in_lines: bool = False  # what the attention takes: see ragged_paged_attention/tpu_lines.py

    @staticmethod
    def choose(
        attention_backend: str,
        linear_backend: str,
        platform: str,
        *,
        quantize_activations: bool = False,
    ) -> Ops:
        """By name; "auto" is the fastest there is. platform: "cpu", "gpu" or "tpu"."""
        chosen = linear.choose(linear_backend, platform)
        if quantize_activations:
            quantized = [partial(op, quantize_x=True) for op in (chosen.linear, chosen.argmax)]
            chosen = dataclasses.replace(chosen, linear=quantized[0], argmax=quantized[1])
        return Ops(
            attention.choose(attention_backend, platform),
            chosen,
            rotary.choose(chosen.name),
            sampling.choose(chosen.name),
            experts.choose(chosen, platform),
            cache_in_lines=attention_backend == "pallas",
        )
