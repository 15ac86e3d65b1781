"""The promise that everything else rests on: an answer depends on nothing but the request.

Many random requests live together in an engine with a small cache: they arrive in crowds, are computed in
chunks, find prefixes in the cache, are preempted and resumed, and some are given up, also while a step is on the
device. Every answer must equal, token for token, that of the same request alone in an engine with other buckets,
another budget, and no prefix cache, and so must, to the last bit, the hidden states that the tokens were sampled from:
a token seldom shows a rounding that is off. README.md says how to add a feature.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from combo_jobs import Job, make_jobs
from combo_life import Answer, Life, Rig
from combo_models import make_draft, make_head, make_model
from combo_table import AXES, Combo, all_combos, longest_request, pairwise, quick_combos

from noria.engine.request import FinishReason

QUICK, SLOW = 75, 200  # requests of a life
BY_DEFAULT = 3  # of the quick combinations: their programs take most of the time of all tests to compile
BUDGET_ALONE = 128
ALONE = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": BUDGET_ALONE,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}


class Alone:
    """What requests answer when they have an engine to themselves: computed when first asked for, and kept."""

    def __init__(self, models: Path, compile_cache_dir: str) -> None:
        self._models = models
        self._compile_cache_dir = compile_cache_dir
        self._rigs: dict[tuple, Rig] = {}
        self._answers: dict[tuple, list[Answer]] = {}

    def rig(self, model: str, **options: Any) -> Rig:
        speculation = options.get("speculative_config", {})
        make = {"eagle3": make_head, "draft_model": make_draft}.get(speculation.get("method", ""))
        if make is not None:
            drafter = {"model": str(make(model, self._models))}
            options = options | {"speculative_config": speculation | drafter}
        return Rig(make_model(model, self._models), self._compile_cache_dir, **options)

    def fresh(self, model: str, numerics: dict[str, Any]) -> Rig:
        return self.rig(model, num_blocks_override=2 * longest_request(model, 16, BUDGET_ALONE), **ALONE, **numerics)

    def answers(self, model: str, numerics: dict[str, Any], job: Job) -> list[Answer]:
        engine = (model, *sorted(numerics.items()))
        if engine not in self._rigs:
            self._rigs[engine] = self.fresh(model, numerics)
        if (engine, job) not in self._answers:
            self._answers[engine, job] = self._rigs[engine].alone(job)
        return self._answers[engine, job]

    def close(self) -> None:
        for rig in self._rigs.values():
            rig.check_idle()
            rig.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[Alone]:
    references = Alone(tmp_path_factory.mktemp("combo_models"), compile_cache_dir)
    yield references
    references.close()


def check_combo(combo: Combo, alone: Alone, count: int, seed: int) -> None:
    jobs = [combo.tweak(job) for job in make_jobs(count, seed)]
    rig = alone.rig(combo.model, **combo.options)
    life = Life(rig, jobs, f"{combo} {seed}", crowd=2 * combo.options["max_num_seqs"])
    life.run()
    rig.close()
    complete = 0
    for job, requests in life.done:
        expected = alone.answers(combo.model, combo.numerics, job)
        complete += compare(job, [rig.answer(request) for request in requests], expected)
    assert complete > count / 2
    assert {name for name in combo.must_see if not life.seen[name]} == set()
    assert {name for setting in combo.settings for name in setting.must_not_see if life.seen[name]} == set()


def compare(job: Job, answers: list[Answer], expected: list[Answer]) -> bool:
    """Whether the answers are complete; one that was given up must at least begin like the right one."""
    complete = True
    for found, right in zip(answers, expected, strict=True):
        if found.finish_reason is FinishReason.ABORT:
            complete = False
            right = right.begun(len(found.token_ids), found.prompt_logprobs)
        assert found == right, job
    return complete


@pytest.mark.parametrize(
    "combo",
    [
        pytest.param(combo, id=str(combo), marks=[pytest.mark.slow] * (place >= BY_DEFAULT))
        for place, combo in enumerate(quick_combos())
    ],
)
def test_answers_are_those_of_the_request_alone(combo: Combo, alone: Alone) -> None:
    check_combo(combo, alone, QUICK, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("combo", all_combos(), ids=str)
def test_every_two_settings_together(combo: Combo, seed: int, alone: Alone) -> None:
    check_combo(combo, alone, SLOW, seed)


@pytest.mark.parametrize(("model", "place"), [("gemma3", 3), ("qwen2", 4)])
def test_a_request_alone_is_alone(model: str, place: int, alone: Alone) -> None:
    """The references come from one engine, one after another; here one of them from an engine of its own."""
    job = make_jobs(QUICK, seed=0)[place]
    rig = alone.fresh(model, {})
    assert rig.alone(job) == alone.answers(model, {}, job)
    rig.check_idle()
    rig.close()


@pytest.mark.parametrize("model", ["gemma3", "qwen2"])
def test_the_answers_can_tell_requests_apart(model: str, alone: Alone) -> None:
    """Answers that are all alike, or that depend on the last token only, would equal each other by chance."""
    jobs = [job for job in make_jobs(QUICK, seed=0) if job.params.max_tokens >= 4]
    greedy = [alone.answers(model, {}, job)[0] for job in jobs if job.params.is_greedy]
    drawn = [alone.answers(model, {}, job)[0] for job in jobs if not job.params.is_greedy]
    for answers in (greedy, drawn):
        long_ones = [answer.token_ids for answer in answers if len(answer.token_ids) >= 4]
        assert len(set(long_ones)) > 0.9 * len(long_ones) > 10
    followers: dict[int, set[int]] = {}
    for answer in greedy:
        for token, follower in itertools.pairwise(answer.token_ids):
            followers.setdefault(token, set()).add(follower)
    assert sum(len(seconds) > 1 for seconds in followers.values()) > 5
    reasons = {answer.finish_reason for answer in (*greedy, *drawn)}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}


def test_life_has_every_accident(alone: Alone) -> None:
    """The random lives are worth something: aborts in every state, ids that come back, preemption, cached prefixes."""
    usual = {name: axis[0] for name, axis in AXES.items()}
    combo = Combo(tuple({**usual, "grammar": AXES["grammar"][1]}.values()))
    rig = alone.rig(combo.model, **combo.options)
    life = Life(rig, [combo.tweak(job) for job in make_jobs(SLOW, seed=0)], "accidents", crowd=16)
    life.run()
    rig.close()
    states = ("waiting", "held", "running", "in prefill", "preempted")
    accidents = ("preempted", "cached tokens", "same id again", *(f"aborted {state}" for state in states))
    assert [name for name in accidents if not life.seen[name]] == []


def test_what_runs_by_default_has_every_quick_setting() -> None:
    quick = {setting.name for axis in AXES.values() for setting in axis if setting.quick}
    chosen = quick_combos()[:BY_DEFAULT]
    assert {setting.name for combo in chosen for setting in combo.settings} == quick


def test_pairwise_covers_every_pair() -> None:
    for axes in (AXES.values(), [axis[:2] for axis in AXES.values()]):
        axes = list(axes)
        combos = pairwise(axes)
        assert all(
            any(one in combo.settings and other in combo.settings for combo in combos) == one.goes_with(other)
            for left, right in itertools.combinations(axes, 2)
            for one, other in itertools.product(left, right)
        )
        assert len(combos) <= 3 * max(map(len, axes)) ** 2 + len(axes)
