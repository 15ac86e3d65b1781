"""Speculation never changes an answer: with drafts that are right, wrong, or both, everything is as without."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_idle, scheduler_of

from noria import LLM, SamplingParams
from noria.config import StructuredOutputsParams
from noria.spec.proposer import DraftRequest

TEXTS = ["the mill the mill the mill the", "flour", "the miller waits and waits and waits for the river", "A"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
LOOPS = {40: 100.0, 41: 100.0}  # a biased request says little else
JSON = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
SPECIAL: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 23},
    {"max_tokens": None},
    {"max_tokens": 20, "n": 3},
    {"max_tokens": 30, "stop_token_ids": list(range(40, 52))},
    {"max_tokens": 30, "stop_token_ids": list(range(40, 52)), "min_tokens": 9},
    {"max_tokens": 30, "stop_token_ids": list(range(60, 100))},
    {"max_tokens": 30, "stop": ["e", "th"]},
    {"max_tokens": 30, "stop": ["e", "th"], "min_tokens": 8, "include_stop_str_in_output": True},
    {"max_tokens": 30, "ignore_eos": False},
    {"max_tokens": 30, "logprobs": 4},
    {"max_tokens": 30, "logprobs": 0, "prompt_logprobs": 2},
    {"max_tokens": 30, "logit_bias": LOOPS, "logprobs": 1},
    {"max_tokens": 30, "logit_bias": LOOPS, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"max_tokens": 30, "allowed_token_ids": [40, 41, 42], "repetition_penalty": 1.3, "logprobs": 2},
    {"max_tokens": 30, "bad_words": ["the", "er"]},
    {"max_tokens": 40, "top_k": 3, "top_p": 0.8},
    {"max_tokens": 40, "structured_outputs": StructuredOutputsParams(json=JSON), "ignore_eos": False},
    {"max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex="(ab|cd){4,20}"), "logprobs": 1},
    {"max_tokens": 30, "min_tokens": 12, "structured_outputs": StructuredOutputsParams(regex="(ab){2,9}")},
]


class Knowing:
    """Drafts for the requests of which it knows the answers; a share of them is wrong from some place on."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: float) -> None:
        """answers: of prompts. wrong: share of the bursts."""
        self._answers = answers
        self._wrong = wrong
        self._random = random.Random(1)
        self.forgotten = 0

    def may_propose(self, request: DraftRequest) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._drafts(request) for request in requests]

    def forget(self, key: Hashable) -> None:
        self.forgotten += 1

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _drafts(self, request: DraftRequest) -> list[int]:
        known = request.token_ids
        for prompt, answer in self._answers.items():
            begun = len(known) - len(prompt)
            if begun >= 0 and known == [*prompt, *answer[:begun]]:
                drafts = answer[begun : begun + request.num_drafts]
                if drafts and self._random.random() < self._wrong:
                    drafts[self._random.randrange(len(drafts))] = 7
                return drafts
        return []


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "plain"])
def drafting(options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**options, speculative_config=NGRAM, async_scheduling=request.param) as llm:
        yield llm
        check_idle(llm)


def answers(llm: LLM, params: SamplingParams | list[SamplingParams], texts: Sequence[Any] = TEXTS) -> list:
    results = llm.generate(list(texts), params)
    return [(result.outputs, result.prompt_logprobs, result.usage["completion_tokens"]) for result in results]


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_answers_are_those_without_drafts(drafting: LLM, llm: LLM, special: dict[str, Any]) -> None:
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        params = SamplingParams(**{"ignore_eos": True} | how | special)
        texts = TEXTS + ([] if params.prompt_logprobs is not None else TEXTS)  # those sequences are told once
        assert answers(drafting, params, texts) == answers(llm, params, texts)


def test_some_drafts_were_right_and_some_wrong(drafting: LLM) -> None:
    """Of the tests above and a repetitive text."""
    before = drafting.stats.speculation
    drafting.generate(TEXTS, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    drafting.generate(TEXTS, SamplingParams(max_tokens=50, ignore_eos=True, seed=1, allowed_token_ids=[40, 41]))
    stats = drafting.stats.speculation
    assert before.num_accepted_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert sum(stats.proposed_per_position) == stats.num_draft_tokens
    assert len(stats.accepted_per_position) == 5
    assert stats.proposed_per_position[0] == stats.num_drafts
    assert 1 < stats.mean_acceptance_length < 6


@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("special", [SPECIAL[i] for i in (2, 6, 9, 11, 14, 15, 18)], ids=str)
def test_right_and_wrong_drafts(drafting: LLM, llm: LLM, special: dict[str, Any], wrong: float) -> None:
    """By somebody who knows the answers, whatever they are; in one batch with greedy and random ones."""
    given = [
        SamplingParams(**{"ignore_eos": True, "temperature": 0.0 if seed % 2 else 0.9, "seed": seed} | special)
        for seed in range(6)
    ]
    prompts = [[60 + seed, *range(9, 12 + 2 * seed)] for seed in range(6)]
    expected = llm.generate(prompts, given)
    speculation = drafting.engine.core.speculation
    known = {tuple(prompt): result.outputs[0].token_ids for prompt, result in zip(prompts, expected)}
    knowing = Knowing(known, wrong)
    own, speculation._proposer = speculation._proposer, knowing
    before = drafting.stats.speculation
    try:
        found = drafting.generate(prompts, given)
    finally:
        speculation._proposer = own
    assert [result.outputs for result in found] == [result.outputs for result in expected]
    after = drafting.stats.speculation
    proposed = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert proposed > 0
    assert knowing.forgotten == 6
    if wrong == 0:
        assert accepted == proposed
    elif "structured_outputs" not in special:  # a grammar refuses most of what is wrong beforehand
        assert accepted < proposed


def test_right_drafts_save_steps(drafting: LLM, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [expected] = llm.generate([[9, 10, 11]], params)
    speculation = drafting.engine.core.speculation
    own, speculation._proposer = speculation._proposer, Knowing({(9, 10, 11): expected.outputs[0].token_ids}, 0)
    try:
        before = drafting.stats.steps
        parts = list(drafting.stream([9, 10, 11], params))
    finally:
        speculation._proposer = own
    counts = [len(part.outputs[0].token_ids) for part in parts]
    assert counts == [1, 4, 6, 6, 6, 6, 6, 5]
    assert drafting.stats.steps - before == 8
    assert "".join(part.outputs[0].text for part in parts) == expected.outputs[0].text


def test_a_small_pool_and_chunked_prompts(options: dict[str, Any], llm: LLM) -> None:
    """More requests than seats, preempted and resumed, in every order of the loop and with bursts."""
    prompts = [[5 + (seed * 7 + index) % 180 for index in range(3 + 5 * (seed % 8))] for seed in range(20)]
    given = [
        SamplingParams(
            temperature=seed % 3 / 2, seed=seed, max_tokens=30, ignore_eos=True, logprobs=2 if seed % 5 == 0 else None,
            allowed_token_ids=list(range(40, 44)) if seed % 2 else None, presence_penalty=0.5 * (seed % 4 == 1),
        )
        for seed in range(20)
    ]  # fmt: skip
    expected = [result.outputs for result in llm.generate(prompts, given)]
    for changes in ({}, {"async_scheduling": False}, {"num_scheduler_steps": 4}):
        with LLM(**options | changes | {"num_blocks_override": 14}, speculative_config=NGRAM) as other:
            assert [result.outputs for result in other.generate(prompts, given)] == expected
            assert other.stats.scheduler.num_preemptions > 0
            assert other.stats.speculation.num_accepted_tokens > 0
            check_idle(other)


def test_a_follow_up_finds_what_drafts_have_computed(drafting: LLM) -> None:
    prompt = [9 + i % 5 for i in range(12)]
    [first] = drafting.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    ids = [*prompt, *first.outputs[0].token_ids]
    [second] = drafting.generate([[*ids[:45], 5, 6]], SamplingParams(temperature=0, max_tokens=3))
    assert second.num_cached_tokens == 40  # whole blocks of 8


def test_a_stream_that_is_left_while_drafts_are_verified(drafting: LLM) -> None:
    stream = drafting.stream(TEXTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not scheduler_of(drafting).has_unfinished


CODE = ("for i in range(9):", "x[i] = x[i-1]*x[i]", "def f(a, b): ", "if a == b: return", "a = {1: 2, 3: 4}")


def mixed_prompts() -> tuple[list[Any], list[SamplingParams]]:
    """50, greedy: repetitive ones, code, plain ones, and JSON under a schema."""
    rng = random.Random(0)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    json = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=JSON))
    prompts, given = list[Any](), []
    for index in range(50):
        part = [rng.randrange(6, 190) for _ in range(rng.randint(1, 8))]
        kinds = ((part * 20)[: rng.randint(1, 20)], CODE[index // 4 % len(CODE)], part, part)
        prompts.append(kinds[index % 4])
        given.append(json if index % 4 == 3 else greedy)
    return prompts, given


@pytest.mark.slow
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "plain"])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_every_number_of_drafts(
    options: dict[str, Any], llm: LLM, similar_model: Path, head: Path, method: str, count: int, ahead: bool
) -> None:
    """The pool holds two of 50 requests."""
    prompts, given = mixed_prompts()
    expected = [result.outputs for result in llm.generate(prompts, given)]
    own: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1}, "draft_model": {"model": str(similar_model)}, "eagle3": {"model": str(head)}
    }  # fmt: skip
    speculation = {"method": method, "num_speculative_tokens": count} | own[method]
    small = options | {"num_blocks_override": 18, "async_scheduling": ahead, "kv_cache_memory_bytes": 2**20}
    with LLM(**small, speculative_config=speculation) as other:
        assert [result.outputs for result in other.generate(prompts, given)] == expected
        assert other.stats.scheduler.num_preemptions > 0
        assert other.stats.speculation.num_draft_tokens > 50
        assert other.stats.speculation.num_accepted_tokens > 0 or method == "eagle3"  # of random weights
        check_idle(other)
