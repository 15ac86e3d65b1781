"""What a step must read and compute: closed forms against counting one by one, and whole runs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from noria.config import SamplingParams
from noria.models.decoder import Decoder
from noria.models.llama import llama, mixtral
from noria.nn.param import abstract_params
from noria.runner import work
from noria.runner.work import Work, WorkModel
from noria.scheduler.schedule import CachedRequest, NewRequest, Schedule

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MATRICES = 3 * (8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 12)  # parameters of the layers
NORMS = 3 * 2 * 8 + 8
TOKEN_BYTES = 2 * 2 * 6 * 4  # keys and values, heads, elements, float32


def model(windows: tuple[int | None, ...] = (None, None, None)) -> WorkModel:
    config = dataclasses.replace(llama(CONFIG), windows=windows)
    return WorkModel(config, abstract_params(Decoder(config).declaration(), "float32"), TOKEN_BYTES)


@given(st.integers(0, 60), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 40)))
def test_keys_and_pairs(computed: int, count: int, window: int | None) -> None:
    seen = [set(range(max(0, p - (window or 10**6) + 1), p + 1)) for p in range(computed, computed + count)]
    assert work._pairs(computed, count, window) == sum(map(len, seen))
    assert work._keys(computed, count, window) == len(set().union(*seen))


def test_a_step_of_two_requests() -> None:
    found = model().forward([(10, 1), (0, 4)])
    assert found.bytes_read == 4 * (MATRICES + NORMS) + 3 * TOKEN_BYTES * (11 + 4)
    assert found.flops == 2 * MATRICES * 5 + 4 * 4 * 6 * 3 * (11 + 1 + 2 + 3 + 4)
    assert found.steps == 1


def test_experts_are_read_and_computed_where_they_are_chosen() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = mixtral(CONFIG | experts)
    weights = abstract_params(Decoder(config).declaration(), "float32")
    found = WorkModel(config, weights, TOKEN_BYTES).forward([(10, 1), (0, 1)])
    attention, router, expert = 8 * 24 + 2 * 8 * 12 + 24 * 8, 4 * 8, 3 * 8 * 12
    # Two tokens that choose two of four leave out a quarter of them.
    assert found.bytes_read == 4 * (3 * (attention + router + 4 * expert * 3 / 4) + NORMS) + 3 * TOKEN_BYTES * (11 + 1)
    assert found.flops == 2 * 3 * (attention + router + 2 * expert) * 2 + 4 * 4 * 6 * 3 * (11 + 1)
    half = dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts=2))  # on one of two devices
    weights = abstract_params(Decoder(half).declaration(), "float32")
    shared = WorkModel(half, weights, TOKEN_BYTES).forward([(10, 1), (0, 1)])
    assert found.flops - shared.flops == 2 * 3 * expert * 2
    assert found.bytes_read - shared.bytes_read == 4 * 3 * 2 * expert * 3 / 4


def test_attention_that_is_divided_by_request() -> None:
    """Of all that is not attention each of the ranks has its part in the work for all requests."""
    config = llama(CONFIG)
    weights = abstract_params(Decoder(config).declaration(), "float32")
    found = WorkModel(config, weights, TOKEN_BYTES, attention_ranks=2).forward([(10, 1), (0, 4)])
    attention = 3 * (8 * 24 + 2 * 8 * 12 + 24 * 8)
    assert found.bytes_read == 4 * (MATRICES + NORMS) + 3 * TOKEN_BYTES * (11 + 4) / 2
    assert found.flops == 2 * ((MATRICES - attention) * 5 + attention * 2.5) + 4 * 4 * 6 * 3 * (11 + 1 + 2 + 3 + 4) / 2


def test_windows_limit_what_is_read() -> None:
    found = model((None, 4, 4)).forward([(10, 1)])
    assert found.bytes_read == 4 * (MATRICES + NORMS) + TOKEN_BYTES * (11 + 4 + 4)


def test_the_head_is_read_once_for_all_rows_and_not_without_any() -> None:
    assert model().sample(3) == Work(50 * 8 * 4, 2 * 50 * 8 * 3)
    assert model().sample(0) == Work()


def test_a_run_samples_when_the_prompt_is_complete() -> None:
    """A prompt in two chunks, a decode step, and a step in which it comes back after a preemption."""
    new = NewRequest("a", [1] * 5, SamplingParams(), frozenset(), 0, 5, 0, ([1],))
    resumed = CachedRequest("a", 2, ([1],), resumed=True, token_ids=[1] * 7)
    schedules = [
        Schedule(new_requests=(new,), num_scheduled_tokens={"a": 3}),
        Schedule(cached_requests=(CachedRequest("a", 3, ([],)),), num_scheduled_tokens={"a": 2}),
        Schedule(cached_requests=(CachedRequest("a", 5, ([],)),), num_scheduled_tokens={"a": 1}),
        Schedule(cached_requests=(resumed,), num_scheduled_tokens={"a": 4}),
        Schedule(cached_requests=(CachedRequest("a", 6, ([],)),), num_scheduled_tokens={"a": 1}),
    ]
    m = model()
    forwards = [m.forward([rows]) for rows in ((0, 3), (3, 2), (5, 1), (2, 4), (6, 1))]
    expected = sum([*forwards, *[m.sample(1)] * 3], start=Work())
    assert m.total(schedules) == expected
    assert expected.steps == 5


def test_weights_count_as_they_are_stored() -> None:
    config = llama(CONFIG)
    weights = abstract_params(Decoder(config).declaration(), "float32")
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float16), weights)
    assert WorkModel(config, half, 1).sample(1).bytes_read * 2 == WorkModel(config, weights, 1).sample(1).bytes_read
