"""With most_model_len steps of short and long requests are several forward passes, and no answer tells."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.batch.pack import StepInputs
from noria.errors import ConfigError

MOST = 16  # tokens: tables of 2 blocks in 8 rows; those of max_model_len, 64, have 8 blocks, in 2 rows
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[{"num_scheduler_steps": 4}, {"async_scheduling": False, "speculative_config": NGRAM}],
    ids=["ahead-bursts", "plain-drafts"],
)
def two_shapes(options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**options, most_model_len=MOST, **request.param) as llm:
        yield llm
        check_idle(llm)


@pytest.fixture
def passes(two_shapes: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How many steps had so many short and long forward passes. Bursts are (0, 0)."""
    seen, runner = Counter[tuple[int, int]](), two_shapes.engine.core.runner
    forward, decode = runner.forward, runner.decode

    def watched(inputs: StepInputs) -> Any:
        kinds = [each.is_long for each in inputs.executions]
        seen[kinds.count(False), kinds.count(True)] += 1
        return forward(inputs)

    def watched_burst(inputs: StepInputs) -> Any:
        seen[0, 0] += 1
        return decode(inputs)

    monkeypatch.setattr(runner, "forward", watched)
    monkeypatch.setattr(runner, "decode", watched_burst)
    return seen


def prompts_and_params(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Of all lengths, greedy and random, some with log-probabilities, penalties, or a beginning that others have."""
    rng = random.Random(5)
    shared = [rng.randrange(6, 190) for _ in range(20)]
    prompts, params = [], []
    for index in range(count):
        own = [rng.randrange(6, 190) for _ in range(rng.choice([2, 5, 12, 30, 44]))]
        prompts.append(shared + own[:10] if index % 4 == 3 else own)
        params.append(
            SamplingParams(
                temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=rng.choice([3, 9, 20]), ignore_eos=True,
                logprobs=2 if index % 3 == 0 else None, prompt_logprobs=1 if index % 5 == 2 else None,
                frequency_penalty=0.5 if index % 7 == 6 else 0.0,
            )
        )  # fmt: skip
    return prompts, params


def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    return [(result.outputs, result.prompt_logprobs) for result in llm.generate(prompts, params)]


def test_answers_are_those_of_one_shape(two_shapes: LLM, llm: LLM, passes: Counter[tuple[int, int]]) -> None:
    prompts, params = prompts_and_params(32)
    assert answers(two_shapes, prompts, params) == answers(llm, prompts, params)
    assert {(1, 0), (0, 1), (1, 1), (1, 2)} <= passes.keys()
    [again] = two_shapes.generate([prompts[3]], GREEDY)
    assert again.num_cached_tokens >= 16  # whole blocks of what many begin with


def test_steps_of_many_long_requests(two_shapes: LLM, llm: LLM, passes: Counter[tuple[int, int]]) -> None:
    """Seven long ones and a short one: four passes of two rows at most, and one. Drafts let some end early."""
    prompts = [[20 + index] * (4 if index == 4 else 25) for index in range(8)]
    assert answers(two_shapes, prompts, GREEDY) == answers(llm, prompts, GREEDY)
    if two_shapes.config.speculation is None:
        assert passes[1, 4] > 0
        assert passes[0, 4] > 0  # when the short one has grown
    else:
        assert passes[1, 2] > 0


def test_prompts_that_several_passes_score(two_shapes: LLM, llm: LLM, passes: Counter[tuple[int, int]]) -> None:
    """In the second step the first is long, and the other two begin."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    prompts = [list(range(30, 56)), [60, 61, 62], [63, 64, 65]]
    assert answers(two_shapes, prompts, params) == answers(llm, prompts, params)
    assert passes[1, 1] > 0


def test_bursts_and_drafts_go_on_beside_them(two_shapes: LLM, llm: LLM, passes: Counter[tuple[int, int]]) -> None:
    prompts = [[40, 41, 42, 40, 41, 42], [50, 51]]
    assert answers(two_shapes, prompts, GREEDY) == answers(llm, prompts, GREEDY)
    assert passes[0, 1] > 0  # in the end they are long
    if two_shapes.config.num_scheduler_steps > 1:
        assert passes[0, 0] > 0
    else:
        assert two_shapes.stats.speculation.num_draft_tokens > 0


@pytest.mark.slow
def test_a_draft_model_keeps_one_shape(options: dict[str, Any], llm: LLM, similar_model: Path) -> None:
    speculation = {"method": "draft_model", "model": str(similar_model), "num_speculative_tokens": 3}
    prompts, params = prompts_and_params(16)
    with LLM(**options, most_model_len=MOST, speculative_config=speculation) as other:
        assert answers(other, prompts, params) == answers(llm, prompts, params)
        assert other.stats.speculation.num_accepted_tokens > 0
        check_idle(other)


def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\Amost_model_len \(64\) must be less than max_model_len \(64\)"):
        LLM(**options, most_model_len=64)
