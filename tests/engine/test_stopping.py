"""When a sequence ends, and what is left of it: stop tokens, stop strings, lengths."""

from __future__ import annotations

import pytest

from noria import LLM, SamplingParams
from noria.engine.outputs import CompletionOutput
from noria.engine.request import FinishReason

PROMPT = "the water wheel turns"
EOS = 2


def run(llm: LLM, prompt: str | list[int] = PROMPT, **params) -> CompletionOutput:
    [answer] = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | params))
    return answer.outputs[0]


@pytest.fixture
def free(llm: LLM) -> CompletionOutput:
    """What the model says when nothing stops it."""
    output = run(llm)
    assert len(output.token_ids) == 24
    return output


def first_new(items: list) -> int:
    """The first place from 4 on whose item does not occur before."""
    return next(i for i in range(4, len(items)) if items[i] not in items[:i])


def test_stop_token(llm: LLM, free: CompletionOutput):
    place = first_new(free.token_ids)
    stop = free.token_ids[place]
    output = run(llm, stop_token_ids=[189, stop])
    assert output.token_ids == free.token_ids[: place + 1]  # the stop token is one of the ids, but not in the text
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == stop
    assert output.text == llm.tokenizer.decode(free.token_ids[:place], continuation=True)
    shown = run(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == llm.tokenizer.decode(free.token_ids[: place + 1], continuation=True)


def test_end_of_sequence(llm: LLM):
    """Seeds until one says </s> by itself; then the same seed with and without ignore_eos."""
    params = {"temperature": 1.0, "max_tokens": 30}
    for seed in range(200):
        ignoring = run(llm, seed=seed, **params)
        if EOS in ignoring.token_ids[4:-1] and EOS not in ignoring.token_ids[:4]:
            break
    else:
        pytest.fail("no seed made an end of sequence")
    assert ignoring.finish_reason is FinishReason.LENGTH
    place = ignoring.token_ids.index(EOS)
    output = run(llm, seed=seed, ignore_eos=False, **params)
    assert output.token_ids == ignoring.token_ids[: place + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, EOS)
    assert output.text == llm.tokenizer.decode(ignoring.token_ids[:place], continuation=True)
    later = run(llm, seed=seed, ignore_eos=False, min_tokens=place + 2, **params)
    assert later.token_ids[:place] == ignoring.token_ids[:place]
    assert EOS not in later.token_ids[: place + 2]
    assert len(later.token_ids) >= place + 2


def test_min_tokens_bans_stop_tokens(llm: LLM, free: CompletionOutput):
    place = first_new(free.token_ids)
    stop = free.token_ids[place]
    output = run(llm, stop_token_ids=[stop], min_tokens=place + 4)
    assert output.token_ids[:place] == free.token_ids[:place]
    assert stop not in output.token_ids[: place + 4]
    assert len(output.token_ids) >= place + 4
    assert run(llm, stop_token_ids=[stop], min_tokens=place).token_ids == free.token_ids[: place + 1]


@pytest.fixture
def across(llm: LLM) -> tuple[str, int, int]:
    """A stop string that begins within one token's text and ends within a later one's; where it starts in the text;
    how many tokens complete it."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    pieces = [part.outputs[0].text for part in llm.stream(PROMPT, params)]
    text = "".join(pieces)
    for index in range(5, 20):
        before = "".join(pieces[:index])
        if len(before) < 1 or len(pieces[index]) < 1:
            continue
        stop = before[-1] + pieces[index][0]
        if text.find(stop) == len(before) - 1:
            return stop, len(before) - 1, index + 1
    pytest.fail("this text has no pair of characters that is new and cut by two tokens")


def test_stop_string_across_tokens(llm: LLM, free: CompletionOutput, across: tuple[str, int, int]):
    stop, start, tokens = across
    output = run(llm, stop=["never said", stop])
    assert output.text == free.text[:start]
    assert output.token_ids == free.token_ids[:tokens]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert run(llm, stop=stop, include_stop_str_in_output=True).text == free.text[: start + len(stop)]


def test_stream_holds_back_what_may_become_a_stop_string(llm: LLM, free: CompletionOutput, across: tuple):
    stop, start, _ = across
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
    text = ""
    for part in llm.stream(PROMPT, params):
        text += part.outputs[0].text
        assert free.text[:start].startswith(text)
    assert text == free.text[:start]


def test_min_tokens_lets_an_early_stop_string_pass(llm: LLM, free: CompletionOutput, across: tuple[str, int, int]):
    stop, _, tokens = across
    output = run(llm, stop=stop, min_tokens=tokens + 1)
    assert output.text.startswith(free.text[: len(output.text)])
    assert len(output.token_ids) > tokens
    assert run(llm, stop=stop, min_tokens=tokens).token_ids == free.token_ids[:tokens]


def test_a_beginning_of_a_stop_string_at_the_end_is_text(llm: LLM, free: CompletionOutput):
    output = run(llm, stop=free.text[-1] + "and more that never comes")
    assert output.text == free.text
    assert output.finish_reason is FinishReason.LENGTH


def test_stop_string_in_one_of_several_sequences(llm: LLM):
    params = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 16, "ignore_eos": True}
    [answer] = llm.generate(PROMPT, SamplingParams(**params))
    texts = [output.text for output in answer.outputs]
    stop = next(texts[1][i : i + 2] for i in range(3, len(texts[1]) - 3))
    [stopped] = llm.generate(PROMPT, SamplingParams(**params, stop=stop))
    for text, output in zip(texts, stopped.outputs):
        assert output.text == text.partition(stop)[0]
        assert (output.stop_reason == stop) == (stop in text)
    assert stopped.outputs[1].finish_reason is FinishReason.STOP


def test_lengths(llm: LLM, free: CompletionOutput):
    for length in (1, 5):
        output = run(llm, max_tokens=length)
        assert output.token_ids == free.token_ids[:length]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("prompt_length", [40, 63])
def test_max_model_len_ends_a_sequence(llm: LLM, prompt_length: int):
    prompt = [9 + i % 50 for i in range(prompt_length)]
    for max_tokens in (None, 200):
        output = run(llm, prompt, max_tokens=max_tokens)
        assert len(output.token_ids) == 64 - prompt_length
        assert output.finish_reason is FinishReason.LENGTH


def test_special_tokens_are_shown_on_demand(llm: LLM):
    for seed in range(200):
        ids = run(llm, temperature=1.0, seed=seed).token_ids
        if set(ids) & llm.tokenizer.special_ids:
            break
    else:
        pytest.fail("no seed made a special token")
    hidden = run(llm, temperature=1.0, seed=seed).text
    shown = run(llm, temperature=1.0, seed=seed, skip_special_tokens=False).text
    assert hidden == llm.tokenizer.decode(ids, continuation=True)
    assert shown == llm.tokenizer.decode(ids, continuation=True, skip_special_tokens=False)
    assert len(shown) > len(hidden)
