"""The bookkeeping of a draft model's cache: whatever the target makes of drafts, the next ones are read from what is
right, and drafts are what the model would go on with."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runner import FakeRunner, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.cache.layout import plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.draft_model import DraftModelProposer
from noria.scheduler.schedule import Schedule, StepResult
from noria.spec.proposer import DraftRequest

BLOCK_SIZE, BUDGET = 4, 12


class FakeDraft(FakeRunner):
    """Takes a resumed sequence's tokens as they are: those it had sampled were guesses."""

    config = SimpleNamespace(max_num_batched_tokens=BUDGET, num_scheduler_steps=4, max_model_len=64)

    def execute_model(self, schedule: Schedule) -> None:
        for cached in schedule.cached_requests:
            if cached.resumed:
                row = self.rows[cached.request_id]
                assert cached.token_ids is not None
                same = sum(1 for _ in zip(row.token_ids, cached.token_ids) if _[0] == _[1])
                row.token_ids = list(cached.token_ids)
                row.contents = []
                assert same >= cached.num_computed_tokens or cached.num_computed_tokens % BLOCK_SIZE == 0
        self._result = self.step(schedule)

    def sample_tokens(self) -> Any:
        result = self._result
        return SimpleNamespace(result=lambda: StepResult(result.sampled_token_ids))


def make(num_blocks: int, windows: tuple[int | None, ...] = (None,)) -> tuple[DraftModelProposer, PagedCache]:
    proposer, (cache,) = make_ranks(1, num_blocks, windows)
    return proposer, cache


def make_ranks(
    ranks: int, num_blocks: int, windows: tuple[int | None, ...] = (None,)
) -> tuple[DraftModelProposer, list[PagedCache]]:
    layout = plan_layout(windows)
    caches = [PagedCache(layout, num_blocks, BLOCK_SIZE) for _ in range(ranks)]
    runner: Any = FakeDraft(layout, num_blocks, BLOCK_SIZE)
    runner.config = SimpleNamespace(**vars(runner.config) | {"max_num_batched_tokens": ranks * BUDGET})
    return DraftModelProposer(runner, caches), caches


def wanted(key: int, token_ids: list[int], count: int, rank: int = 0) -> DraftRequest:
    return DraftRequest(key, "", token_ids, count, SamplingParams(), 0, rank=rank)


def test_a_prompt_is_caught_up_in_chunks() -> None:
    proposer, cache = make(32)
    token_ids = [i % 7 for i in range(30)]
    assert [proposer.propose([wanted(1, token_ids, 3)]) for _ in range(2)] == [[[]], [[]]]
    assert proposer.propose([wanted(1, token_ids, 3)]) == [expected_tokens(token_ids, 3)]
    proposer.forget(1)
    proposer.forget(2)
    assert cache.stats.num_used == 0
    assert proposer.propose([wanted(3, [*token_ids, 1], 4)]) == [expected_tokens([*token_ids, 1], 4)]  # found in cache


@pytest.mark.parametrize("right", range(5))
def test_wrong_drafts_are_rolled_back(right: int) -> None:
    proposer, cache = make(32)
    token_ids = [1, 2, 3, 4, 5]
    [drafts] = proposer.propose([wanted(1, token_ids, 4)])
    assert drafts == expected_tokens(token_ids, 4)
    token_ids += [*drafts[:right], 49 if right == 4 else (drafts[right] + 1) % 50]
    assert proposer.propose([wanted(1, token_ids, 2)]) == [expected_tokens(token_ids, 2)]
    assert proposer.propose([wanted(1, token_ids, 1)]) == [expected_tokens(token_ids, 1)]
    cache.check_integrity()


def test_every_rank_has_its_own_budget_and_blocks() -> None:
    proposer, caches = make_ranks(2, 32)
    prompts = [[i % 7 for i in range(BUDGET)], [i % 5 for i in range(BUDGET)]]
    turn = [wanted(rank, tokens, 3, rank) for rank, tokens in enumerate(prompts)]
    assert proposer.propose(turn) == [expected_tokens(tokens, 3) for tokens in prompts]  # both in one step
    assert all(cache.stats.num_used > 0 for cache in caches)
    assert proposer.propose([wanted(0, prompts[0], 3, 1)]) == [expected_tokens(prompts[0], 3)]  # it has moved
    assert caches[0].stats.num_used == 0
    proposer.forget(0)
    proposer.forget(1)
    assert caches[1].stats.num_used == 0


@given(
    st.integers(0, 2**32), st.sampled_from([(None,), (None, 6, 6)]), st.sampled_from([14, 30]), st.sampled_from([1, 3])
)
@settings(max_examples=20)
def test_random_lives(seed: int, windows: tuple[int | None, ...], num_blocks: int, ranks: int) -> None:
    """More sequences than the pool holds; they change their ranks. The runner checks all that is read."""
    rng = random.Random(seed)
    proposer, caches = make_ranks(ranks, num_blocks * len(set(windows)), windows)
    rank_of: dict[int, int] = {}
    sequences: dict[int, list[int]] = {}
    serial = given_drafts = 0
    for _ in range(40):
        if len(sequences) < 4 and rng.random() < 0.6:
            sequences[serial] = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            serial += 1
        for key in sequences:
            if key not in rank_of or rng.random() < 0.1:
                rank_of[key] = rng.randrange(ranks)
        chosen = [(key, tokens) for key, tokens in sequences.items() if rng.random() < 0.8]
        turn = [wanted(key, tokens, rng.randint(1, 5), rank_of[key]) for key, tokens in chosen]
        if not turn:
            continue
        for request, drafts in zip(turn, proposer.propose(turn), strict=True):
            tokens = request.token_ids
            assert drafts in ([], expected_tokens(tokens, request.num_drafts))
            given_drafts += bool(drafts)
            right = rng.randint(0, len(drafts))
            tokens += [*drafts[:right], rng.randrange(50)]
            if len(tokens) > 40 or rng.random() < 0.05:
                del sequences[request.key]
                proposer.forget(request.key)
        for cache in caches:
            cache.check_integrity()
    assert given_drafts > 0
    for key in sequences:
        proposer.forget(key)
    assert all(cache.stats.num_used == 0 for cache in caches)
