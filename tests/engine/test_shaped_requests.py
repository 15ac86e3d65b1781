"""Penalties, biases and bans through the whole engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams

VOCAB = 192
PROMPT = "the water wheel turns and the river runs"


@pytest.fixture(scope="module")
def open_llm(options: dict[str, Any]) -> Iterator[LLM]:
    """One that tells the log-probabilities of its whole vocabulary."""
    with LLM(**options, max_logprobs=VOCAB) as llm:
        yield llm
        check_idle(llm)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": 20} | options)


def ids_of(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> list[int]:
    [answer] = llm.generate(prompt, params)
    return answer.outputs[0].token_ids


@pytest.mark.parametrize(
    ("penalties", "beside"),
    [
        ({"presence_penalty": 2.0}, 0),
        ({"frequency_penalty": 0.8}, 3),
        ({"frequency_penalty": -1.5, "presence_penalty": 1.0}, 7),
        ({"frequency_penalty": 2.0, "logit_bias": {9: 4.0, 17: -3.0, 40: 100.0}}, 2),
        ({"presence_penalty": -2.0, "bad_token_ids": [5, 6, 7], "min_tokens": 20}, 0),
    ],
)
def test_each_token_is_the_best_after_penalties(open_llm: LLM, penalties: dict[str, Any], beside: int):
    """Log-probabilities are logits but for a constant, so numpy can say which token must come."""
    params = greedy(logprobs=VOCAB, **penalties)
    answers = open_llm.generate([PROMPT, *["flour and mill"] * beside], [params, *[greedy(max_tokens=9)] * beside])
    output = answers[0].outputs[0]
    assert output.logprobs is not None
    seen: list[int] = []
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        logits = np.array([found[i].logprob for i in range(VOCAB)])
        for other in set(seen):
            logits[other] -= params.frequency_penalty * seen.count(other) + params.presence_penalty
        for other, bias in params.biases:
            logits[other] += bias
        logits[list(params.bad_token_ids or ())] = -np.inf
        assert logits[token_id] >= logits.max() - 1e-4
        seen.append(token_id)
    if params.presence_penalty == 2.0:
        assert seen != ids_of(open_llm, greedy())


def test_repetition_counts_the_prompt_too(llm: LLM):
    """The one token that only the prompt has; penalized without measure nothing comes twice."""
    plain = ids_of(llm, greedy(max_tokens=1), [20, 21, 22])
    again = ids_of(llm, greedy(max_tokens=1, repetition_penalty=1e6), [20, 21, 22, *plain])
    after = ids_of(llm, greedy(max_tokens=12, repetition_penalty=1e6), [20, 21, 22, *plain])
    assert after[0] == again[0]
    assert not {20, 21, 22, *plain} & set(after)
    assert len(set(after)) == len(after)


def test_a_bias_decides(llm: LLM):
    assert ids_of(llm, greedy(logit_bias={77: 100})) == [77] * 20
    first = ids_of(llm, greedy())[0]
    assert first not in ids_of(llm, greedy(logit_bias={first: -100}))


def test_only_what_is_allowed(llm: LLM):
    allowed = [10, 20, 30, 40]
    answers = llm.generate(
        [PROMPT] * 4,
        [
            greedy(allowed_token_ids=allowed),
            SamplingParams(temperature=2.0, seed=1, allowed_token_ids=allowed, max_tokens=30, ignore_eos=True),
            greedy(allowed_token_ids=allowed, bad_token_ids=[10, 20, 30]),
            greedy(),
        ],
    )
    ids = [answer.outputs[0].token_ids for answer in answers]
    assert set(ids[0]) <= set(allowed)
    assert set(ids[1]) == set(allowed)
    assert ids[2] == [40] * 20
    assert not set(ids[3]) <= set(allowed)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e300},
        {"temperature": 1e38},
        {"temperature": 1e-39},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e6},
        {"repetition_penalty": 1e-6, "temperature": 1e-30},
        {"repetition_penalty": 1e-6, "temperature": 1e300, "top_p": 1e-300, "min_p": 1e-300},
    ],
)
def test_numbers_that_float32_barely_holds(llm: LLM, extreme: dict[str, Any]):
    """What is banned stays so, and all that is told is finite."""
    params = SamplingParams(**{"seed": 1, "max_tokens": 30} | extreme, bad_token_ids=list(range(96)), logprobs=20)
    [output] = llm.generate(PROMPT, dataclasses.replace(params, ignore_eos=True))[0].outputs
    assert len(output.token_ids) == 30
    assert min(output.token_ids) >= 96
    assert max(output.token_ids) < VOCAB
    assert output.logprobs is not None
    assert all(math.isfinite(logprob.logprob) for figures in output.logprobs for logprob in figures.values())


def test_bad_tokens_never_come(llm: LLM):
    plain = set(ids_of(llm, greedy()))
    assert not plain & set(ids_of(llm, greedy(bad_token_ids=sorted(plain))))


def test_bad_words_never_come(llm: LLM):
    """One of a token and one of several, both from what the model would say; run-ahead is on."""
    plain = ids_of(llm, greedy())
    encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)
    decode = lambda ids: llm.tokenizer.decode(ids, continuation=True)
    spans = [plain[i : i + n] for n in (1, 2, 3) for i in range(len(plain) - n + 1)]
    words = {len(ids): decode(ids) for ids in spans if decode(ids).strip() and encode(decode(ids).lstrip()) == ids}
    assert {1, 2} <= set(words)
    for length, word in words.items():
        answer = ids_of(llm, greedy(bad_words=[word]))
        bad = encode(word)
        assert len(bad) == length
        assert bad not in [answer[i : i + length] for i in range(len(answer))]
        # Up to the token that was not allowed everything is as before.
        first = next(i for i in range(len(plain)) if plain[i : i + length] == bad) + length - 1
        assert answer[:first] == plain[:first]
        assert answer[first] != plain[first]


def test_all_of_it_together_in_a_crowd(llm: LLM):
    """Each answer is that of its request alone."""
    every = [
        greedy(),
        greedy(presence_penalty=1.0),
        SamplingParams(seed=3, frequency_penalty=0.5, logprobs=2, max_tokens=20, ignore_eos=True),
        greedy(logit_bias={33: 6.5}, repetition_penalty=1.3),
        SamplingParams(seed=4, temperature=0.7, max_tokens=20, ignore_eos=True),
        greedy(bad_token_ids=[4, 5, 6], logprobs=0),
        SamplingParams(seed=5, repetition_penalty=0.8, top_k=5, max_tokens=20, ignore_eos=True),
        greedy(prompt_logprobs=1),
        greedy(bad_words=["the", "river runs"], frequency_penalty=2.0),
    ]
    alone = [llm.generate(PROMPT, params)[0].outputs for params in every]
    llm.reset_prefix_cache()
    together = [answer.outputs for answer in llm.generate([PROMPT] * len(every), every)]
    assert together == alone


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "plain"])
def test_a_preemption_loses_nothing(options: dict[str, Any], llm: LLM, ahead: bool):
    """Counts, biases and the beginnings of bad words are there again, with the token that was on the device; the pool
    holds little more than one request."""
    prompts = [[10 + i, *range(20, 40)] for i in range(4)]
    plain = [answer.outputs[0].token_ids for answer in llm.generate(prompts, greedy(max_tokens=40))]
    words = bad_words_of(llm, plain)
    assert len(words) >= 8
    shaped = [
        greedy(max_tokens=40, bad_words=words),
        greedy(max_tokens=40, bad_words=words, frequency_penalty=0.6, logit_bias={50: 2.0}),
        greedy(max_tokens=40, repetition_penalty=1.2, logprobs=3),
        SamplingParams(seed=2, max_tokens=40, ignore_eos=True, bad_words=words, presence_penalty=0.5, logprobs=0),
    ]
    expected = [answer.outputs for answer in llm.generate(prompts, shaped)]
    assert expected[0][0].token_ids != plain[0]
    with LLM(**options | {"num_blocks_override": 12}, async_scheduling=ahead) as tight:
        assert [answer.outputs for answer in tight.generate(prompts, shaped)] == expected
        assert tight.stats.scheduler.num_preemptions > 1
        check_idle(tight)


def bad_words_of(llm: LLM, answers: list[list[int]]) -> list[str]:
    """Texts of two and three tokens that occur in the answers."""
    decode = lambda ids: llm.tokenizer.decode(ids, continuation=True)
    spans = [ids[i : i + n] for ids in answers for n in (2, 3) for i in range(len(ids) - n + 1)]
    encode = lambda text: llm.tokenizer.encode(text.lstrip(), add_special_tokens=False)
    return list(dict.fromkeys(decode(ids) for ids in spans if decode(ids).strip() and encode(decode(ids)) == ids))[:30]


@pytest.mark.parametrize(
    "params",
    [
        greedy(logprobs=5),
        SamplingParams(seed=1, logprobs=5, top_k=1),
        greedy(presence_penalty=1.0),
        greedy(logit_bias={3: 1.0}),
        greedy(prompt_logprobs=5),
    ],
    ids=["logprobs", "random-logprobs", "penalty", "bias", "prompt-logprobs"],
)
def test_the_first_request_ever_compiles_nothing(options: dict[str, Any], llm: LLM, params: SamplingParams):
    """strict_compile is on, so a compile would also raise."""
    [expected] = llm.generate(PROMPT, params)
    with LLM(**options) as fresh:
        [answer] = fresh.generate(PROMPT, params)
        check_idle(fresh)
    assert answer.outputs == expected.outputs
    assert answer.prompt_logprobs == expected.prompt_logprobs


def test_bursts_wait_for_shaped_requests(options: dict[str, Any], llm: LLM):
    """And come back when the last of them has ended."""
    plain, shaped = greedy(max_tokens=30), greedy(max_tokens=10, presence_penalty=1.0, logprobs=1)
    expected = [answer.outputs for answer in llm.generate([PROMPT] * 2, [plain, shaped])]
    with LLM(**options, num_scheduler_steps=8) as bursting:
        lengths: list[tuple[int, int]] = []
        core = bursting.engine.core
        core.on_schedule = lambda s: lengths.append((len(s.num_scheduled_tokens), s.num_steps))
        assert [answer.outputs for answer in bursting.generate([PROMPT] * 2, [plain, shaped])] == expected
        check_idle(bursting)
    assert all(steps == 1 for rows, steps in lengths if rows == 2)
    assert any(steps > 1 for rows, steps in lengths if rows == 1)


def test_plain_requests_use_nothing_of_it(options: dict[str, Any]):
    """Two programs a step, an upload each, and no tables."""
    with LLM(**options) as fresh:
        runner = fresh.engine.core.runner
        uploads: list[tuple[str, int]] = []
        call = runner._programs.call

        def watched(key: Any, job: Any, *arguments: Any) -> Any:
            uploads.append((key[0], sum(isinstance(argument, np.ndarray) for argument in arguments)))
            return call(key, job, *arguments)

        runner._programs.call = watched
        ids_of(fresh, greedy())
        ids_of(fresh, SamplingParams(temperature=1.0, top_p=0.9, seed=1))
        assert set(uploads) == {("forward", 1), ("sample", 1)}
        assert len(uploads) <= 2 * fresh.stats.steps
        assert runner._shaper._tables is None
        runner._programs.call = call
        ids_of(fresh, greedy(presence_penalty=1.0))
        assert runner._shaper._tables is not None
