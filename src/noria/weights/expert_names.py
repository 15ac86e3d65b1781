"""The tensors of experts, under one name each: mlp.experts.{expert}.gate_proj.weight, up_proj and down_proj.

Checkpoints also have them as the matrices of all experts in one tensor, and Mixtral calls them by other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_MIXTRAL: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL_NAME = re.compile(r"(.*)\.block_sparse_moe\.(?:(gate\.weight)|(experts\.\d+)\.(w[123])\.weight)")
# Of transformers 5: [experts, 2 * inner, hidden] and [experts, hidden, inner].
_STACKED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def own_name(name: str) -> str:
    """Of a tensor that may have Mixtral's."""
    found = _MIXTRAL_NAME.fullmatch(name)
    if found is None:
        return name
    layer, router, expert, matrix = found.groups()
    return f"{layer}.mlp.gate.weight" if router else f"{layer}.mlp.{expert}.{_MIXTRAL[matrix]}.weight"


def parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Of a tensor that holds the matrices of all experts: name, shape and number of the first element of each, which
    lie one behind the other. Nothing of any other tensor."""
    found = _STACKED_NAME.fullmatch(name)
    if found is None or len(shape) != 3 or shape[1] % len(_STACKED[found[2]]):
        return
    matrices = _STACKED[found[2]]
    part = (shape[1] // len(matrices), shape[2])
    for expert in range(shape[0]):
        for place, matrix in enumerate(matrices):
            start = (expert * len(matrices) + place) * part[0] * part[1]
            yield f"{found[1]}.{expert}.{matrix}.weight", part, start
