"""Which layers share a block table: layer groups, and how many blocks a request needs over all of them.

One pool of blocks serves all groups, because a block of any group has the same size: it holds `block_size` tokens of
`slots` layers. A model whose layers all attend alike is one group. A model that mixes full attention with sliding
windows is cut into groups of at most `slots` layers of one kind each; every group has its own block table per request,
and the tables of sliding groups give the blocks back that left the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BlockIds = tuple[list[int], ...]  # a block table, or a part of one: one list per group, in position order

# A group beyond the first costs a block table on the host and on the device and a partly filled block per request;
# it has to save this share of a long request's memory to be worth it.
_COST_OF_A_GROUP = 0.01
# "Long" in units of the largest window: the layout is chosen for the requests whose memory matters.
_LONG_REQUEST_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table. The i-th of `layers` is in slot i of each block of the group."""

    window: int | None  # tokens a query sees, itself included; None: all
    layers: tuple[int, ...]

    def first_needed_block(self, position: int, block_size: int) -> int:
        """Index of the first block that queries at `position` and later read."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The device cache is one array [slots * num_blocks, block_size, kv_heads, 2, head_dim].

    Layer l finds block b of the table of group `layer_group[l]` in row `layer_slot[l] * num_blocks + b`.
    """

    groups: tuple[GroupSpec, ...]
    slots: int  # layers in a block
    layer_group: tuple[int, ...]  # [layers]
    layer_slot: tuple[int, ...]  # [layers]

    @property
    def num_groups(self) -> int:
        return len(self.groups)


def plan_layout(windows: Sequence[int | None]) -> CacheLayout:
    """The layout of a model; `windows` has one entry per layer: its sliding window, or None for full attention.

    The number of slots is the one that makes a long request (8 of the largest windows) take the fewest bytes, counting
    the places left empty in the last group of a kind, where every group costs one percent on top; of equals the larger.
    15 sliding and 3 full layers become 5 + 1 groups of 3 slots, 22 and 4 become 6 + 1 groups of 4 (two places empty).
    Raises ValueError when there is no layer or a window is not positive.
    """
    if not windows:
        raise ValueError("a cache layout needs at least one layer")
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if window is not None and window < 1:
            raise ValueError(f"layer {layer}: the sliding window must be at least 1, not {window}")
        kinds.setdefault(window, []).append(layer)
    largest = max(len(layers) for layers in kinds.values())
    # Of equals min() takes the first. With one kind there is nothing to trade: all layers are one group.
    slots = largest if len(kinds) == 1 else min(range(largest, 0, -1), key=lambda size: _cost(kinds, size))
    groups = tuple(
        GroupSpec(window, tuple(layers[start : start + slots]))
        for window, layers in kinds.items()
        for start in range(0, len(layers), slots)
    )
    place = {layer: (group, slot) for group, spec in enumerate(groups) for slot, layer in enumerate(spec.layers)}
    return CacheLayout(
        groups=groups,
        slots=slots,
        layer_group=tuple(place[layer][0] for layer in range(len(windows))),
        layer_slot=tuple(place[layer][1] for layer in range(len(windows))),
    )


def _cost(kinds: dict[int | None, list[int]], slots: int) -> float:
    """Token places that a long request takes over all layers of several kinds, plus the charge for groups."""
    length = _LONG_REQUEST_WINDOWS * max(window for window in kinds if window is not None)
    num_groups, places = 0, 0
    for window, layers in kinds.items():
        groups = _ceil_div(len(layers), slots)
        num_groups += groups
        places += groups * slots * (length if window is None else window)
    return places * (1 + _COST_OF_A_GROUP * num_groups)


def blocks_for_group(spec: GroupSpec, num_tokens: int, block_size: int, max_chunk: int) -> int:
    """The most blocks that one request of `num_tokens` holds at a time in the group, computed in chunks of `max_chunk`.

    A sliding group holds the window of the chunk's first token and the chunk; the span may begin anywhere in a block.
    """
    everything = _ceil_div(num_tokens, block_size)
    if spec.window is None:
        return everything
    span = spec.window - 1 + max_chunk
    return min(everything, _ceil_div(block_size - 1 + span, block_size))


def blocks_for_request(layout: CacheLayout, num_tokens: int, block_size: int, max_chunk: int) -> int:
    """The most blocks that one request of `num_tokens` holds at a time over all groups (see blocks_for_group)."""
    return sum(blocks_for_group(spec, num_tokens, block_size, max_chunk) for spec in layout.groups)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
