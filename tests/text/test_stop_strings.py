from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.text.stop import StopStrings


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include)
    emitted = [watcher.push(piece) for piece in pieces]
    return [*emitted, watcher.finish()], watcher.matched


def test_the_text_ends_before_the_stop_string() -> None:
    emitted, matched = run(["The quick br", "own", " f", "ox jumps"], ["own fox"])
    assert emitted == ["The quick br", "", "", "", ""]
    assert matched == "own fox"


def test_the_stop_string_is_kept_when_asked_for() -> None:
    emitted, matched = run(["The quick br", "own", " f", "ox jumps"], ["own fox"], include=True)
    assert emitted == ["The quick br", "", "", "own fox", ""]
    assert matched == "own fox"


def test_a_near_miss_is_flushed_whole() -> None:
    assert run(["The quick br", "own", " f", "ur"], ["own fox"]) == (["The quick br", "", "", "own fur", ""], None)
    assert run(["The quick br", "own fo"], ["own fox"]) == (["The quick br", "", "own fo"], None)


def test_a_false_start_inside_a_stop_string_is_found() -> None:
    assert run(["aa", "aab", "x"], ["aab"]) == (["", "aa", "", ""], "aab")
    assert run(["aba", "bac"], ["abac"]) == (["", "ab", ""], "abac")


def test_after_a_match_nothing_more_comes() -> None:
    watcher = StopStrings(["."], include_in_output=True)
    assert watcher.push("One. Two.") == "One."
    assert watcher.push("Three.") == ""
    assert watcher.finish() == ""


def test_the_first_to_end_wins_and_the_longest_of_those() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa", ""], "bc")
    assert run(["own fox"], ["fox", "own fox"]) == (["", ""], "own fox")
    assert run(["two one"], ["one", "two"]) == (["", ""], "two")


def test_without_stop_strings_all_passes_at_once() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_unchecked_text_cannot_end_a_stop_string() -> None:
    watcher = StopStrings(["END"], include_in_output=False)
    assert watcher.push("a END b EN", check=False) == "a END b "
    assert watcher.matched is None
    assert watcher.push("D c") == ""  # its last character is checked
    assert watcher.matched == "END"

    watcher = StopStrings(["aa"], include_in_output=False)
    assert watcher.push("aaa", check=False) == "aa"
    assert watcher.push("b") == "ab"
    assert watcher.matched is None


@pytest.mark.parametrize("size", [1000, 100_000])
def test_text_that_always_looks_like_a_beginning_is_not_searched_again(size: int) -> None:
    watcher = StopStrings(["a" * 500 + "b", "a" * 499 + "c"], include_in_output=False)
    emitted = "".join(watcher.push("a" * 100) for _ in range(size // 100))
    assert len(emitted) == size - 500
    assert emitted + watcher.finish() == "a" * size


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: try every end in turn, and the longest stop string there."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_the_result_is_the_definition_however_the_text_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    emitted, matched = run(pieces, stops, include)
    assert ("".join(emitted), matched) == expected("".join(pieces), stops, include)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=6),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops, include_in_output=False)
    seen = emitted = ""
    for piece in pieces:
        seen += piece
        emitted += watcher.push(piece)
        if watcher.matched is not None:
            return
        held = seen[len(emitted) :]
        assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)
