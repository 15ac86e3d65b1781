"""Requests that cannot be served are refused by name, before anything runs, and touch no other request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no text": ("", "the prompt is empty"),
    "no text in a list": (["the", ""], "the prompt is empty"),
    "no ids": ([[]], "the prompt is empty"),
    "no ids in a dictionary": ({"prompt_token_ids": []}, "the prompt is empty"),
    "as long as max_model_len": ([5] * 64, r"64 tokens, but max_model_len \(64\)"),
    "text longer than max_model_len": ("Z" * 300, r"300 tokens, but max_model_len"),
    "id too large": ([5, 192, 6], "192, which is no token id; ids are 0 to 191"),
    "id negative": ([5, -1], "-1, which is no token id"),
    "id of another type": ([5, True], "integers, not True"),
    "id of another type in a list": ([[5, 2.5]], "integers, not 2.5"),
    "an array of fractions": (np.array([5.0]), "one row of integers, not of shape .* dtype float64"),
    "an array of truths": ({"prompt_token_ids": np.array([True])}, "one row of integers"),
    "an array without a row": (np.array(5), "one row of integers"),
    "an array of arrays of rows": (np.zeros((1, 2, 3), int), "one row of integers"),
    "an empty array": (np.zeros(0, int), "the prompt is empty"),
    "an id too large in an array": (np.array([5, 192]), "192, which is no token id"),
    "a number": (5, "not int"),
    "nothing": (None, "not NoneType"),
    "bytes": (b"the", "prompt"),
    "a number in a list": (["the", 5], "must be a string or a list of token ids, not int"),
    "a number in a dictionary": ({"prompt": 5}, "must be a string or a list of token ids, not int"),
    "text and ids": ({"prompt": "the", "prompt_token_ids": [5]}, "either prompt or prompt_token_ids"),
    "unknown key": ({"prompt": "the", "image": "x"}, "either prompt or prompt_token_ids"),
    "no key": ({}, "either prompt or prompt_token_ids"),
    "half a character": ("the \ud83d mill", r"surrogate \(U\+D83D\) at character 4"),
}
BAD_PARAMS: dict[str, tuple[Any, str]] = {
    "stop token too large": (SamplingParams(stop_token_ids=[192]), "stop_token_ids: 192"),
    "stop token negative": (SamplingParams(stop_token_ids=[-3]), "stop_token_ids: -3"),
    "too many stop tokens": (
        SamplingParams(min_tokens=1, stop_token_ids=list(range(20))),
        "min_tokens.*stop_token_ids",
    ),
    "min_tokens too long": (SamplingParams(min_tokens=64, max_tokens=None), r"min_tokens \(64\).*max_model_len"),
    "biased token too large": (SamplingParams(logit_bias={5: 1, 192: 1}), "logit_bias: 192 is not a token id"),
    "biased token negative": (SamplingParams(logit_bias={-1: 1}), "logit_bias: -1 is not a token id"),
    "allowed token too large": (SamplingParams(allowed_token_ids=[5, 500]), "allowed_token_ids: 500"),
    "bad token too large": (SamplingParams(bad_token_ids=[10**12]), "bad_token_ids: 1000000000000"),
    "bad word too long": (SamplingParams(bad_words=["Z" * 9]), "bad_words: 'Z+' is 9 tokens long; at most 8"),
    "bad word of half a character": (SamplingParams(bad_words=["a\ud83d"]), "bad_words: .*surrogate"),
    "too many bad words": (
        SamplingParams(bad_words=[a + b for a in "QXYZ" for b in "QXYZJV0123456789!"]),
        "bad_words: at most 64",
    ),
    "all that is allowed is bad": (
        SamplingParams(allowed_token_ids=[5, 6], bad_token_ids=[6, 5]),
        "allowed_token_ids leaves nothing",
    ),
    "all that is allowed ends it": (
        SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1),
        "allowed_token_ids leaves nothing",
    ),
    "everything is bad": (SamplingParams(bad_token_ids=list(range(192))), "bad_token_ids leaves nothing"),
    "too many logprobs": (SamplingParams(logprobs=21), r"logprobs \(21\) exceeds .*max_logprobs \(20\)"),
    "too many of the prompt": (SamplingParams(prompt_logprobs=50), r"prompt_logprobs \(50\) exceeds"),
    "a dictionary": ({"temperature": 0}, "sampling_params.*not dict"),
    "a dictionary in a list": ([{"temperature": 0}], "sampling_params.*not dict"),
    "a string": ("x", "sampling_params.*not str"),
    "a number": (5, "sampling_params.*not int"),
    "too few": ([], "1 prompts need as many sampling_params, not 0"),
    "too many": ([GREEDY] * 2, "1 prompts need as many sampling_params, not 2"),
}


def refused(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    steps = llm.stats.steps
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value)
    assert llm.stats.steps == steps
    check_idle(llm)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt(llm: LLM, name: str):
    prompts, message = BAD_PROMPTS[name]
    refused(llm, prompts, GREEDY, message)


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_params(llm: LLM, name: str):
    params, message = BAD_PARAMS[name]
    refused(llm, ["the"], params, message)


def test_as_many_stop_tokens_as_min_tokens_can_ban(llm: LLM):
    """The limit counts the model's own end of sequence."""
    llm.generate("the", SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=list(range(10, 25))))
    llm.generate("the", SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=list(range(10, 26)), ignore_eos=True))
    refused(llm, "the", SamplingParams(min_tokens=1, stop_token_ids=list(range(10, 26))), "at most 16 stop tokens")


def test_one_bad_prompt_among_good_ones(llm: LLM):
    good = ["the water", "flour"]
    expected = [a.outputs[0].token_ids for a in llm.generate(good, GREEDY)]
    refused(llm, [good[0], [5] * 100, good[1]], GREEDY, "100 tokens")
    assert [a.outputs[0].token_ids for a in llm.generate(good, GREEDY)] == expected


def test_a_refusal_leaves_running_requests_alone(llm: LLM):
    [expected] = llm.generate("the water", GREEDY)
    stream = llm.stream("the water", GREEDY)
    ids = list(next(stream).outputs[0].token_ids)
    for prompts, message in BAD_PROMPTS.values():
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="empty"):
        llm.stream("", GREEDY)  # at once, not at the first part
    ids += [i for part in stream for i in part.outputs[0].token_ids]
    assert ids == expected.outputs[0].token_ids


def test_without_a_tokenizer(options: dict):
    with LLM(**options, skip_tokenizer_init=True) as llm:
        refused(llm, "the", GREEDY, "skip_tokenizer_init")
        refused(llm, [[5]], SamplingParams(stop="x"), "stop .*skip_tokenizer_init")
        with pytest.raises(RequestError, match="template"):
            llm.chat([{"role": "user", "content": "the"}])
        [answer] = llm.generate([[5, 6]], GREEDY)
        assert answer.outputs[0].text == ""
        assert len(answer.outputs[0].token_ids) == 6
