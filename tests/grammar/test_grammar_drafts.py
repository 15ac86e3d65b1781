"""A matcher that looks ahead along drafts is afterwards where it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grammars import EOS, PIECES, allowed, begin, encode, write

from noria.config import StructuredOutputsParams

JSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "begun", "drafts", "count"),
    [
        ({"choice": ["abcd", "abxy"]}, "", encode("abcd"), 4),
        ({"choice": ["abcd", "abxy"]}, "a", encode("bxyz"), 3),
        ({"choice": ["abcd", "abxy"]}, "a", encode("xy"), 0),
        ({"regex": "[a-c]+"}, "ab", [*encode("ca"), EOS, ord("a")], 2),  # an end is never a draft
        ({"regex": "[a-c]+"}, "ab", [], 0),
        ({"json": JSON}, '{"a"', encode(": 12"), 4),
        ({"json": JSON}, '{"a":', encode('"12"'), 0),
    ],
)
def test_drafts_are_cut_where_the_grammar_refuses_them(
    options: dict[str, Any], begun: str, drafts: list[int], count: int
) -> None:
    matcher = begin(StructuredOutputsParams(**options))
    write(matcher, begun)
    before = allowed(matcher)
    assert matcher.allowed(drafts) == count
    assert (allowed(matcher), matcher.error) == (before, None)


@pytest.mark.parametrize(("options", "text"), [({"regex": "[a-c]{3,5}x?"}, "abcab"), ({"json": JSON}, '{"a": 12}')])
def test_a_mask_for_every_draft(options: dict[str, Any], text: str) -> None:
    matcher = begin(StructuredOutputsParams(**options))
    write(matcher, text[0])
    later, drafts = matcher.copy(), encode(text[1:])
    rows = np.zeros((len(drafts) + 1, -(-len(PIECES) // 32)), np.int32)
    for _ in range(2):  # the second time from the same state
        matcher.fill_ahead(rows, drafts)
        assert matcher.error is None
    for index, row in enumerate(rows):
        found = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        assert found == allowed(later)
        if index < len(drafts):
            later.accept(drafts[index])
    assert write(matcher, text[1:]) in ("may end", "must end", "more")
    assert not matcher.has_ended
