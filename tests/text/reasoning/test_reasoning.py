from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.text.deltas import ContentDelta, ReasoningDelta
from noria.text.reasoning.formats import REASONING_FORMATS, recognize

ASKED = "<|im_start|>assistant\n"
NAMES = tuple(REASONING_FORMATS)


def read(name: str, prompt: str, pieces: Iterable[str]) -> tuple[str, str]:
    """Reasoning and content; no reasoning comes after content."""
    parser = REASONING_FORMATS[name].parser(prompt)
    reasoning = content = ""
    for deltas in [*map(parser.push, pieces), parser.finish()]:
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    assert text
                    assert not content
                    reasoning += text
                case ContentDelta(text):
                    assert text
                    content += text
                case _:
                    raise AssertionError(delta)
    return reasoning, content


def read_whole(name: str, prompt: str, text: str) -> tuple[str, str]:
    whole = read(name, prompt, [text])
    assert read(name, prompt, text) == whole
    for place in range(len(text)):
        assert read(name, prompt, [text[:place], text[place:]]) == whole
    return whole


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (ASKED, "<think>\nHm, 1 < 2.\n\nSo\n</think>\n\nYes <b>\n"),
        (ASKED, "\n<think>Hm, 1 < 2.\n\nSo</think>Yes <b>\n"),
        (f"{ASKED}<think>\n", "Hm, 1 < 2.\n\nSo\n</think>\n\nYes <b>\n"),
        (f"{ASKED}<think>\n", "<think>\nHm, 1 < 2.\n\nSo\n</think>\n\nYes <b>\n"),
        (f"{ASKED}<think>", "\n\nHm, 1 < 2.\n\nSo\n</think>\n\nYes <b>\n"),
    ],
)
def test_reasoning_comes_first(name: str, prompt: str, text: str) -> None:
    assert read_whole(name, prompt, text) == ("Hm, 1 < 2.\n\nSo", "Yes <b>\n")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_prompt_that_closed_it_has_none(name: str) -> None:
    prompt = f"{ASKED}<think>\n\n</think>\n\n"
    for text in ("Yes", "\n<think> is a tag, </think> too"):
        assert read_whole(name, prompt, text) == ("", text)


def test_without_a_marker_the_formats_differ() -> None:
    assert read_whole("qwen3", ASKED, " Yes.\n") == ("", " Yes.\n")
    assert read_whole("deepseek_r1", ASKED, " Hm</think> Yes.") == ("Hm", "Yes.")
    assert read_whole("qwen3", ASKED, "Hm</think>") == ("", "Hm</think>")


def test_the_users_words_about_markers_do_not_count() -> None:
    for words in ("what is <think>?", "what is </think>?"):
        assert read_whole("qwen3", f"<|im_start|>user\n{words}{ASKED}", "A tag.") == ("", "A tag.")


def test_what_is_not_closed_lasts_to_the_end() -> None:
    assert read_whole("qwen3", ASKED, "<think>Hm </thi\n") == ("Hm </thi\n", "")
    assert read_whole("qwen3", ASKED, "<thin") == ("", "<thin")
    assert read_whole("qwen3", f"{ASKED}<think>", "<thin") == ("<thin", "")
    assert read_whole("qwen3", ASKED, "<think></think>") == ("", "")
    assert read_whole("qwen3", ASKED, "") == ("", "")


def test_a_second_block_is_content() -> None:
    assert read_whole("qwen3", ASKED, "<think>a</think>b<think>c</think>") == ("a", "b<think>c</think>")


def test_other_markers() -> None:
    assert read_whole("mistral", "[INST]x[/INST]", "[THINK]a</think>[/THINK]b") == ("a</think>", "b")


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</", " ", "\n", "ab"])).map(
        "".join
    ),
    prompt=st.sampled_from([ASKED, f"{ASKED}<think>\n", f"{ASKED}<think></think>\n", "[THINK]"]),
    data=st.data(),
)
def test_it_does_not_matter_how_a_text_is_cut(name: str, text: str, prompt: str, data: st.DataObject) -> None:
    reasoning, content = read(name, prompt, [text])
    assert read(name, prompt, text) == (reasoning, content)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    assert read(name, prompt, pieces) == (reasoning, content)
    markers = REASONING_FORMATS[name]
    middle = len("".join(reasoning.split()))
    told = "".join((reasoning + content).split())
    assert "".join(text.split()) in (
        told,
        told[:middle] + markers.end + told[middle:],
        markers.begin + told,
        markers.begin + told[:middle] + markers.end + told[middle:],
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '<think>\\n' }}", "qwen3"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|im_start|>", None),
    ],
)
def test_a_format_is_recognized_by_the_template(template: str, name: str | None) -> None:
    assert recognize(template) == name
