"""Warm-up and serving go through the same door: no real step can have a shape that the made-up ones did not."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.batch.buckets import Buckets, rows_with_drafts
from noria.batch.inputs import BatchShape
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.cache.layout import blocks_for_request, plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import EngineConfig, ModelLimits, ResolvedConfig, SamplingParams
from noria.engine.request import Request
from noria.runner.capture import made_up_steps
from noria.scheduler.schedule import NewRequest, Schedule, StepResult
from noria.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Sizes:
    """What the runner derives from its options."""

    config: ResolvedConfig
    num_groups: int = 1

    @property
    def buckets(self) -> Buckets:
        return Buckets.of(self.config)

    @property
    def shape(self) -> BatchShape:
        blocks = -(-self.config.max_model_len // self.config.block_size)
        rows = self.buckets.requests[-1]
        return BatchShape(rows, self.num_groups, blocks, self.buckets.num_logit_rows - rows)

    def made_up(self) -> list[StepInputs]:
        c = self.config
        limits = (c.max_model_len, c.max_num_batched_tokens, c.num_scheduler_steps)
        return list(made_up_steps(self.shape, self.buckets, *limits))

    def captured(self) -> dict[tuple[str, int], StepInputs]:
        """The made-up steps by the program that they are for."""
        programs = {}
        for step in self.made_up():
            programs |= {key: step for key, _ in programs_of(step)}
        return programs


def programs_of(step: StepInputs) -> list[tuple[tuple[str, int], tuple[np.ndarray, ...]]]:
    """The programs that a step needs, and the buffers that they see."""
    if step.is_burst:
        return [(("decode", step.num_rows), (step.forward, step.sample))]
    forward = (("forward", step.num_tokens), (step.forward,))
    if step.shaping is not None:
        return [forward, (("sample shaped", step.num_rows), (step.sample, step.shaping))]
    return [forward, (("sample", step.num_rows), (step.sample,))]


def sizes_of(num_groups: int = 1, **options) -> Sizes:
    return Sizes(EngineConfig(model="m", **options).resolve(ModelLimits(4096, 100), "cpu"), num_groups)


@st.composite
def random_sizes(draw: st.DrawFn) -> Sizes:
    seqs, longest = draw(st.integers(1, 20)), draw(st.integers(2, 100))
    budget = seqs + draw(st.integers(0, 150))
    most = min(16, longest - 1, budget - 1, seqs * longest - 1)
    drafts = draw(st.integers(1, most) | st.none()) if most > 0 else None
    return sizes_of(
        draw(st.integers(1, 3)),
        max_num_seqs=seqs,
        max_model_len=longest,
        max_num_batched_tokens=budget,
        speculative_config=drafts and {"method": "ngram", "num_speculative_tokens": drafts},
        token_bucket_gap=draw(st.sampled_from([0, 0, 8, 16, 48])),
        extra_token_buckets=tuple(draw(st.lists(st.integers(2, 200), max_size=3))),
        block_size=draw(st.sampled_from([4, 16])),
        num_scheduler_steps=draw(st.sampled_from([1, 2, 7])),
    )


def assert_captured(step: StepInputs, captured: dict[tuple[str, int], StepInputs]) -> None:
    """The programs see nothing but shape and dtype of their buffers."""
    for key, buffers in programs_of(step):
        made_up = dict(programs_of(captured[key]))[key]
        for mine, other in zip(buffers, made_up, strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize(
    ("options", "tokens", "requests"),
    [
        ({"max_model_len": 64, "max_num_seqs": 20, "max_num_batched_tokens": 100}, [16, 32, 64, 128], [8, 16, 20]),
        ({"max_model_len": 2048, "max_num_seqs": 1, "max_num_batched_tokens": 64}, [16, 32, 64], [2]),
        ({"max_model_len": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64}, [16, 32, 64], [8]),
        ({"max_model_len": 3, "max_num_seqs": 2, "max_num_batched_tokens": 512}, [16], [2]),
        (
            {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 8, "extra_token_buckets": (2, 5, 9)},
            [2, 5, 9],
            [8],
        ),
    ],
)
def test_every_bucket_is_captured(options: dict, tokens: list[int], requests: list[int]) -> None:
    sizes = sizes_of(**options)
    assert list(sizes.buckets.tokens) == tokens
    assert list(sizes.buckets.requests) == requests
    expected = {("forward", size) for size in tokens}
    expected |= {(name, size) for name in ("sample", "sample shaped") for size in requests}
    assert sizes.captured().keys() == expected
    bursts = sizes_of(**options, num_scheduler_steps=2)
    assert bursts.captured().keys() == expected | {("decode", size) for size in requests}


def test_head_passes_with_drafts_are_captured() -> None:
    options = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    sizes = sizes_of(**options, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    more = {(name, size) for name in ("sample", "sample shaped") for size in (8, 16, 30)}
    assert sizes.captured().keys() == sizes_of(**options).captured().keys() | more


def test_a_program_is_captured_once() -> None:
    """One step for each token bucket and two for each request bucket, which share the forward programs."""
    sizes = sizes_of(max_model_len=64, max_num_seqs=20, max_num_batched_tokens=100)
    steps = sizes.made_up()
    assert [step.num_tokens for step in steps[:4]] == [16, 32, 64, 128]
    assert [step.num_rows for step in steps[4:]] == [8, 8, 16, 16, 20, 20]
    assert [step.shaping is not None for step in steps[4:]] == [False, True] * 3


@given(random_sizes())
@settings(max_examples=50)
def test_made_up_steps_touch_nothing(sizes: Sizes) -> None:
    """Should one run, it writes to null blocks only."""
    shape = sizes.shape
    for step in sizes.made_up():
        num_tables = shape.num_groups * shape.num_rows * shape.num_blocks
        tables = step.forward[-3 - num_tables : -3]
        assert not tables.any()
        assert step.samples.all()


@given(random_sizes(), st.data())
@settings(max_examples=150)
def test_no_step_within_the_budget_misses(sizes: Sizes, data: st.DataObject) -> None:
    """Any counts that the limits allow, down to one token and up to the whole budget, with any sampling parameters."""
    config = sizes.config
    budget, counts = config.max_num_batched_tokens, {}
    for row in range(data.draw(st.integers(1, config.max_num_seqs))):
        if budget == 0:
            break
        counts[str(row)] = data.draw(st.integers(1, min(budget, config.max_model_len)) | st.just(1))
        budget -= counts[str(row)]
    batch = PersistentBatch(sizes.shape, config.max_model_len)
    params = data.draw(
        st.sampled_from(
            [
                SamplingParams(temperature=0),
                SamplingParams(top_p=0.5, seed=1),
                SamplingParams(min_tokens=1, top_k=3),
                SamplingParams(logprobs=3, presence_penalty=1.0, logit_bias={3: 1.0}),
            ]
        )
    )
    requests = []
    for name, count in counts.items():
        computed = data.draw(st.integers(0, config.max_model_len - count))
        blocks = list(range(1, 1 + -(-(computed + count) // config.block_size)))
        requests.append(
            NewRequest(
                request_id=name,
                token_ids=[7] * (computed + count),
                sampling_params=params,
                stop_token_ids=frozenset({1, 2}),
                key=3,
                num_prompt_tokens=computed + count,
                num_computed_tokens=computed,
                block_ids=(blocks,) * sizes.num_groups,
            )
        )
    schedule = Schedule(new_requests=tuple(requests), num_scheduled_tokens=counts)
    batch.apply(schedule)
    assert_captured(pack(schedule, batch, sizes.buckets), sizes.captured())


@given(random_sizes(), st.integers(0, 2**32))
@settings(max_examples=30)
def test_no_step_of_the_scheduler_misses(sizes: Sizes, seed: int) -> None:
    """A pool that is too small for all, so that requests are preempted and come back."""
    rng, config = random.Random(seed), sizes.config
    layout = plan_layout((None,) * sizes.num_groups) if sizes.num_groups == 1 else plan_layout((None, 8, 8))
    sizes = Sizes(config, layout.num_groups)
    chunk = min(config.max_num_batched_tokens, config.max_model_len)
    num_blocks = 2 + 2 * blocks_for_request(layout, config.max_model_len, config.block_size, chunk)
    scheduler = Scheduler(
        PagedCache(layout, num_blocks, config.block_size, enable_prefix_caching=rng.random() < 0.5),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_scheduler_steps=config.num_scheduler_steps,
        rows_with_drafts=rows_with_drafts(config),
    )
    for name in range(2 * config.max_num_seqs + 1):
        prompt = [rng.randrange(3)] * rng.randint(1, config.max_model_len - 1)
        scheduler.add(Request(str(name), prompt, SamplingParams(max_tokens=rng.randint(1, 20)), key=name))
    batch, captured = PersistentBatch(sizes.shape, config.max_model_len), sizes.captured()
    while scheduler.has_unfinished:
        schedule = scheduler.schedule(random_drafts(scheduler, config, rng))
        batch.apply(schedule)
        step = pack(schedule, batch, sizes.buckets)
        assert_captured(step, captured)
        scheduler.update(schedule, run(batch, step))


def random_drafts(scheduler: Scheduler, config: ResolvedConfig, rng: random.Random) -> dict[str, list[int]]:
    """All of them right: see run."""
    if (speculation := config.speculation) is None or rng.random() < 0.3:
        return {}
    drafts = {}
    for request in scheduler.running:
        most = min(speculation.num_speculative_tokens, request.max_num_tokens - 1 - request.num_tokens)
        if most > 0 and request.num_computed_tokens == request.num_tokens - 1 and rng.random() < 0.8:
            drafts[request.request_id] = [5] * rng.randint(1, most)
    return drafts


def run(batch: PersistentBatch, step: StepInputs) -> StepResult:
    rows, steps = step.rows[step.samples], step.steps[step.samples]
    names = [batch.request_ids[row] or "" for row in rows]
    expected = batch.expect(rows, np.flatnonzero(step.samples), steps)
    batch.fulfil(expected, np.full((steps.max(initial=1), len(rows)), 5))
    return StepResult({name: [5] * count for name, count in zip(names, steps.tolist())})
