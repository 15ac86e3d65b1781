"""Layer groups and block counts, with the layer patterns of real models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.cache.layout import GroupSpec, blocks_for_group, blocks_for_request, plan_layout

windows_of_layers = st.lists(st.sampled_from([None, None, 4, 7, 512]), min_size=1, max_size=24)


def alternating(num_layers: int, pattern: int, window: int) -> list[int | None]:
    """Gemma's way: every `pattern`-th layer attends to everything."""
    return [None if (layer + 1) % pattern == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_of_one_kind_are_one_group(window: int | None) -> None:
    layout = plan_layout([window] * 30)
    assert layout.groups == (GroupSpec(window, tuple(range(30))),)
    assert layout.slots == 30
    assert layout.layer_group == (0,) * 30
    assert layout.layer_slot == tuple(range(30))


@pytest.mark.parametrize(
    ("windows", "slots", "sliding_groups", "full_groups"),
    [
        (alternating(18, 6, 512), 3, 5, 1),  # Gemma 3 270M
        (alternating(26, 6, 512), 4, 6, 1),  # Gemma 3 1B: 22 and 4, two places stay empty
        (alternating(34, 6, 1024), 5, 6, 1),  # Gemma 3 4B: 29 and 5
        (alternating(48, 6, 1024), 8, 5, 1),  # Gemma 3 12B
        (alternating(62, 6, 1024), 10, 6, 1),  # Gemma 3 27B: 52 and 10
        (alternating(24, 2, 128), 12, 1, 1),  # half and half
    ],
)
def test_mixed_models(windows: list[int | None], slots: int, sliding_groups: int, full_groups: int) -> None:
    layout = plan_layout(windows)
    assert layout.slots == slots
    assert sum(group.window is not None for group in layout.groups) == sliding_groups
    assert sum(group.window is None for group in layout.groups) == full_groups


def test_layers_keep_their_order_within_a_kind() -> None:
    layout = plan_layout([8, None, 8, 8, None, 8])
    assert layout.groups == (GroupSpec(8, (0, 2)), GroupSpec(8, (3, 5)), GroupSpec(None, (1, 4)))
    assert layout.layer_group == (0, 2, 0, 1, 2, 1)
    assert layout.layer_slot == (0, 0, 1, 0, 1, 1)


@given(windows_of_layers)
def test_every_layer_has_a_place_of_its_own(windows: list[int | None]) -> None:
    layout = plan_layout(windows)
    places = list(zip(layout.layer_group, layout.layer_slot))
    assert len(set(places)) == len(windows) == len(places)
    for layer, (group, slot) in enumerate(places):
        assert 0 <= slot < layout.slots
        assert layout.groups[group].layers[slot] == layer
        assert layout.groups[group].window == windows[layer]


@pytest.mark.parametrize("windows", [[], [0], [None, -1]])
def test_refused(windows: list[int | None]) -> None:
    with pytest.raises(ValueError):
        plan_layout(windows)


@given(
    window=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 3, 8]),
    chunk=st.integers(1, 30),
    num_tokens=st.integers(1, 120),
    start=st.integers(0, 15),
)
def test_blocks_for_group_bounds_what_chunks_hold(
    window: int, block_size: int, chunk: int, num_tokens: int, start: int
) -> None:
    """Counts by hand, for chunks that begin anywhere, the blocks between the window's edge and the chunk's end."""
    spec = GroupSpec(window, (0,))
    most, position = 0, min(start, num_tokens - 1)
    while position < num_tokens:
        end = min(position + chunk, num_tokens)
        oldest = max(0, position - window + 1)
        most = max(most, (end - 1) // block_size - oldest // block_size + 1)
        position = end
    assert most <= blocks_for_group(spec, num_tokens, block_size, chunk)


@pytest.mark.parametrize(("window", "chunk", "block_size"), [(5, 1, 4), (8, 16, 4), (512, 512, 16), (1, 1, 2)])
def test_blocks_for_group_is_reached(window: int, chunk: int, block_size: int) -> None:
    spec = GroupSpec(window, (0,))
    held = [
        (position + chunk - 1) // block_size - (position - window + 1) // block_size + 1
        for position in range(window, window + block_size)
    ]
    assert max(held) == blocks_for_group(spec, 100 * (window + chunk), block_size, chunk)


def test_full_groups_need_everything() -> None:
    assert blocks_for_group(GroupSpec(None, (0,)), 33, 16, 4) == 3
    assert blocks_for_request(plan_layout([None] * 5), 33, 16, 4) == 3


def test_a_mixed_model_needs_less_than_a_full_one() -> None:
    layout = plan_layout(alternating(18, 6, 512))
    mixed = blocks_for_request(layout, 4096, 16, 512) * layout.slots
    full = blocks_for_request(plan_layout([None] * 18), 4096, 16, 512) * 18
    assert mixed == (256 + 5 * 65) * 3  # window - 1 + chunk = 1023 tokens touch 65 blocks
    assert mixed < 0.4 * full
