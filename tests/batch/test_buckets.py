"""Bucket sizes (capabilities P2 and P3) and the lookup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.batch.buckets import MIN_TOKEN_BUCKET, Buckets, pick, request_buckets, token_buckets
from noria.config import EngineConfig, ModelLimits


@pytest.mark.parametrize(
    ("budget", "gap", "extra", "sizes"),
    [
        (512, 0, (), (16, 32, 64, 128, 256, 512)),
        (1, 0, (), (16,)),
        (16, 0, (), (16,)),
        (17, 0, (), (16, 32)),
        (300, 0, (), (16, 32, 64, 128, 256, 512)),
        (512, 128, (), (16, 32, 64, 128, 256, 384, 512)),
        (400, 128, (), (16, 32, 64, 128, 256, 384, 512)),
        (512, 16, (), tuple(range(16, 513, 16))),
        (40, 8, (), (16, 24, 32, 40)),
        (100, 48, (), (16, 32, 80, 128)),  # 64 would exceed the gap
        (512, 4096, (), (16, 32, 64, 128, 256, 512)),
        (64, 0, (8, 24, 48), (8, 16, 24, 32, 48, 64)),
        (64, 0, (32, 32), (16, 32, 64)),
        (16, 0, (2,), (2, 16)),
        (64, 0, (100,), (16, 32, 64)),  # no step has so many tokens
        (300, 0, (320,), (16, 32, 64, 128, 256, 320)),  # covers the budget before 512 does
    ],
)
def test_token_buckets(budget: int, gap: int, extra: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert token_buckets(budget, gap, extra) == sizes


@given(st.integers(1, 5000), st.integers(0, 300), st.lists(st.integers(2, 6000), max_size=4))
def test_token_buckets_cover_the_budget_rounded_up_once(budget: int, gap: int, extra: list[int]) -> None:
    sizes = token_buckets(budget, gap, extra)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] >= budget
    assert all(size < budget for size in sizes[:-1])
    assert sizes[-1] < budget + (gap or budget) or sizes[-1] <= MIN_TOKEN_BUCKET
    assert sizes[0] >= 2
    assert {size for size in extra if size <= budget} <= set(sizes)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (256, (8, 16, 32, 64, 128, 256)),
        (8, (8,)),
        (1, (2,)),  # one row alone would be computed by other code
        (5, (5,)),
        (9, (8, 9)),
        (100, (8, 16, 32, 64, 100)),
    ],
)
def test_request_buckets(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert request_buckets(max_num_seqs) == sizes


def test_the_bucket_of_a_count_is_the_first_that_holds_it() -> None:
    sizes = (16, 32, 64)
    assert [pick(sizes, count) for count in (0, 1, 15, 16, 17, 32, 33, 64)] == [16, 16, 16, 16, 32, 32, 64, 64]
    with pytest.raises(ValueError, match="65 does not fit the largest bucket, 64"):
        pick(sizes, 65)


def test_the_options_of_the_engine_reach_the_buckets() -> None:
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 100, "token_bucket_gap": 32, "extra_token_buckets": (40,)}
    config = EngineConfig(model="m", **options).resolve(ModelLimits(1024, 100), "cpu")
    assert Buckets.of(config) == Buckets(tokens=(16, 32, 40, 64, 96, 128), requests=(8, 12))
