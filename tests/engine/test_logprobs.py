"""Log-probabilities as a caller gets them: of the answer, of the prompt, whole and in a stream."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.errors import RequestError

PROMPT = "the water wheel turns and the river runs under the old mill"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)
RANDOM = SamplingParams(temperature=1.5, seed=8, max_tokens=12, ignore_eos=True, logprobs=4)


def check_figures(llm: LLM, token_ids: list[int], found: Any, num_top: int) -> None:
    assert len(found) == len(token_ids)
    for token_id, figures in zip(token_ids, found):
        (first, own), *_ = figures.items()
        assert first == token_id
        assert num_top <= len(figures) <= num_top + 1 or len(figures) == 1
        top = sorted(figures.values(), key=lambda logprob: -logprob.logprob)
        assert [logprob.rank for logprob in top[:num_top]] == list(range(1, num_top + 1))
        assert own.rank <= num_top or own.logprob <= top[-1].logprob
        assert sum(math.exp(logprob.logprob) for logprob in top) <= 1 + 1e-5
        for token, logprob in figures.items():
            assert logprob.decoded_token == llm.tokenizer.token_bytes(token).decode(errors="replace")
    json.dumps([{i: dataclasses.asdict(v) for i, v in figures.items()} for figures in found], allow_nan=False)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_of_the_answer(llm: LLM, params: SamplingParams):
    [output] = llm.generate(PROMPT, params)[0].outputs
    check_figures(llm, output.token_ids, output.logprobs, 4)
    assert output.logprobs is not None
    own = [figures[token_id] for token_id, figures in zip(output.token_ids, output.logprobs)]
    assert output.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in own))
    assert all(logprob.rank == 1 for logprob in own) == params.is_greedy


def test_only_of_the_token_itself(llm: LLM):
    [output] = llm.generate(PROMPT, dataclasses.replace(RANDOM, logprobs=0))[0].outputs
    [more] = llm.generate(PROMPT, RANDOM)[0].outputs
    assert output.logprobs is not None
    assert more.logprobs is not None
    assert [list(figures) for figures in output.logprobs] == [[token_id] for token_id in output.token_ids]
    assert [figures[i] for i, figures in zip(output.token_ids, output.logprobs)] == [
        figures[i] for i, figures in zip(output.token_ids, more.logprobs)
    ]


def test_nobody_asked(llm: LLM):
    [answer] = llm.generate(PROMPT, dataclasses.replace(GREEDY, logprobs=None))
    assert answer.outputs[0].logprobs is answer.outputs[0].cumulative_logprob is answer.prompt_logprobs is None


def test_they_change_no_token(llm: LLM):
    for params in (GREEDY, RANDOM):
        [with_them], [without] = (llm.generate(PROMPT, p) for p in (params, dataclasses.replace(params, logprobs=None)))
        assert with_them.outputs[0].token_ids == without.outputs[0].token_ids


@pytest.mark.parametrize("n", [1, 3])
def test_in_a_stream(llm: LLM, n: int):
    params = dataclasses.replace(RANDOM, n=n, prompt_logprobs=2)
    [whole] = llm.generate(PROMPT, params)
    parts = list(llm.stream(PROMPT, params))
    assert sum(part.prompt_logprobs is not None for part in parts) == 1
    assert all(len(output.logprobs or ()) == len(output.token_ids) for part in parts for output in part.outputs)
    result = parts[0]
    for part in parts[1:]:
        result.add(part)
    assert result.outputs == whole.outputs
    assert result.prompt_logprobs == whole.prompt_logprobs
    assert len({output.cumulative_logprob for output in whole.outputs}) == n


def test_of_an_answer_that_a_stop_string_cut(llm: LLM):
    [whole] = llm.generate(PROMPT, GREEDY)[0].outputs
    stop = whole.text[3:5]
    [output] = llm.generate(PROMPT, dataclasses.replace(GREEDY, stop=stop))[0].outputs
    assert output.stop_reason == stop
    count = len(output.token_ids)
    assert 0 < count < len(whole.token_ids)
    assert whole.logprobs is not None
    assert output.logprobs == whole.logprobs[:count]
    own = [figures[token_id].logprob for token_id, figures in zip(output.token_ids, output.logprobs)]
    assert output.cumulative_logprob == pytest.approx(sum(own))


def test_of_the_prompt(llm: LLM):
    """To the last bit what the same tokens have when they are generated, however the prompt is cut."""
    [answer] = llm.generate(PROMPT, GREEDY)
    [output] = answer.outputs
    prompt = [*answer.prompt_token_ids, *output.token_ids]
    for beside in (0, 3):
        params = dataclasses.replace(GREEDY, logprobs=None, prompt_logprobs=4, max_tokens=1)
        others = [dataclasses.replace(GREEDY, max_tokens=5)] * beside
        results = llm.generate([*["flour"] * beside, prompt], [*others, params])
        found = results[-1].prompt_logprobs
        assert found is not None
        assert found[0] is None
        check_figures(llm, prompt[1:], found[1:], 4)
        assert found[-len(output.token_ids) :] == output.logprobs


def test_of_a_prompt_that_is_cached(llm: LLM):
    """It is computed once more, and its blocks serve others as ever."""
    params = dataclasses.replace(GREEDY, prompt_logprobs=0)
    llm.generate(PROMPT, GREEDY)
    [again] = llm.generate(PROMPT, GREEDY)
    assert again.num_cached_tokens > 0
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    assert None not in first.prompt_logprobs[1:]
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == again.num_cached_tokens
    llm.reset_prefix_cache()
    assert llm.generate(PROMPT, params)[0].prompt_logprobs == first.prompt_logprobs
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == again.num_cached_tokens


def test_of_a_prompt_of_one_token(llm: LLM):
    assert llm.generate([[7]], dataclasses.replace(GREEDY, prompt_logprobs=3))[0].prompt_logprobs == [None]


def test_of_prompts_whose_requests_are_preempted(options: dict[str, Any], llm: LLM):
    """A pool for little more than one of them."""
    prompts = [[10 + i, *range(20, 40)] for i in range(4)]
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=2, presence_penalty=0.7
    )
    expected = llm.generate(prompts, params)
    with LLM(**options | {"num_blocks_override": 12}) as tight:
        found = tight.generate(prompts, params)
        assert tight.stats.scheduler.num_preemptions > 0
        check_idle(tight)
    assert [a.outputs for a in found] == [a.outputs for a in expected]
    assert [a.prompt_logprobs for a in found] == [a.prompt_logprobs for a in expected]


def test_processed(options: dict[str, Any], llm: LLM):
    """Of what was sampled from: after penalties, temperature and filters."""
    filtered = dataclasses.replace(RANDOM, top_k=3, logprobs=20)
    with LLM(**options, logprobs_mode="processed_logprobs") as processed:
        [answer] = processed.generate(PROMPT, filtered)
        for figures in answer.outputs[0].logprobs or ():
            assert len(figures) == 3
            assert sum(math.exp(logprob.logprob) for logprob in figures.values()) == pytest.approx(1, abs=1e-5)
        [biased] = processed.generate(PROMPT, dataclasses.replace(GREEDY, logit_bias={50: 100}, max_tokens=1))
        assert biased.outputs[0].cumulative_logprob == pytest.approx(0, abs=1e-6)
        [greedy] = processed.generate(PROMPT, GREEDY)
        assert processed.stats.compiles_after_warmup == 0
    assert greedy.outputs == llm.generate(PROMPT, GREEDY)[0].outputs
    raw = llm.generate(PROMPT, filtered)[0].outputs[0]
    assert raw.token_ids == answer.outputs[0].token_ids
    assert raw.logprobs is not None
    assert all(len(figures) >= 20 for figures in raw.logprobs)


def test_as_many_as_the_engine_is_set_to(options: dict[str, Any], llm: LLM):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=rf"{name} \(21\) exceeds .*max_logprobs \(20\)"):
            llm.generate(PROMPT, SamplingParams(**{name: 21}))
    with LLM(**options, max_logprobs=0) as none:
        [answer] = none.generate(PROMPT, dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0))
        [expected] = llm.generate(PROMPT, dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0))
        assert (answer.outputs, answer.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)
        with pytest.raises(RequestError, match="max_logprobs"):
            none.generate(PROMPT, GREEDY)


def test_without_a_tokenizer(options: dict[str, Any], llm: LLM):
    params = dataclasses.replace(GREEDY, prompt_logprobs=1)
    with LLM(**options, skip_tokenizer_init=True) as bare:
        [answer] = bare.generate([[5, 6, 7]], params)
        with pytest.raises(RequestError, match=r"bad_words .*skip_tokenizer_init"):
            bare.generate([[5]], SamplingParams(bad_words=["the"]))
    [expected] = llm.generate([[5, 6, 7]], params)
    nameless = lambda found: [
        figures and {i: dataclasses.replace(v, decoded_token=None) for i, v in figures.items()} for figures in found
    ]
    assert answer.outputs[0].logprobs == nameless(expected.outputs[0].logprobs)
    assert answer.prompt_logprobs == nameless(expected.prompt_logprobs)
