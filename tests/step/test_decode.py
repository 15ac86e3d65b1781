"""The loop of a burst, around a model whose next token is a table: how long it runs, and what each row gets."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.batch.buckets import Buckets
from noria.batch.inputs import NOT_SAMPLED, BatchShape, SampleInputs
from noria.batch.pack import pack
from noria.batch.persistent import PersistentBatch
from noria.cache.layout import plan_layout
from noria.config import SamplingParams
from noria.models.decoder import Decoder
from noria.ops.backends import Ops
from noria.ops.sampling.types import NO_TOKEN
from noria.scheduler.schedule import NewRequest, Schedule
from noria.step.decode import DecodeProgram
from noria.step.programs import StepPrograms

SHAPE, VOCABULARY, MAX_STEPS = BatchShape(num_rows=8, num_groups=1, num_blocks=4), 100, 8
BROKEN = 99  # what follows it is not a number
GREEDY = SamplingParams(temperature=0, max_tokens=None)


class Successor:
    """After token t comes t + 1. Its "cache" is a list of the batches that it was called with."""

    config = SimpleNamespace(windows=(None,), final_soft_cap=None)

    def forward(self, weights: Any, cache: Any, token_ids: Any, batch: Any, addresses: Any, ops: Any) -> Any:
        count, rows, positions, lens = cache
        at = lambda log, value: log.at[count].set(value)
        cache = (count + 1, at(rows, batch.token_rows), at(positions, batch.positions), at(lens, batch.seq_lens))
        return token_ids[:, None], cache

    def logits(self, weights: Any, hidden: Any, num_rows: Any, ops: Any) -> Any:
        logits = jax.nn.one_hot(hidden[:, 0] + 1, VOCABULARY)
        return jnp.where(hidden == BROKEN, jnp.nan, logits)

    def greedy(self, weights: Any, hidden: Any, num_rows: Any, num_tokens: int, ops: Any) -> Any:
        return jnp.where(hidden[:, 0] == BROKEN, NO_TOKEN, hidden[:, 0] + 1)


@dataclass
class Outcome:
    passes: int
    token_rows: np.ndarray  # [passes, rows]
    positions: np.ndarray
    seq_lens: np.ndarray  # [passes, max_num_seqs]
    newest: np.ndarray
    tokens: dict[str, list[int]]


@jax.jit
def program(cache: Any, sampled: jax.Array, forward: jax.Array, sample: jax.Array) -> Any:
    model, ops = cast("Decoder", Successor()), Ops.choose("xla", "xla", "cpu")
    steps = StepPrograms(model, SHAPE, plan_layout((None,)), 1, VOCABULARY, ops)
    return DecodeProgram(steps, MAX_STEPS).decode(None, cache, sampled, forward, sample)[:3]


def request(name: str, token: int, stops: tuple[int, ...] = (), params: SamplingParams = GREEDY) -> NewRequest:
    return NewRequest(name, [1, 2, token], params, frozenset(stops), 0, 2, 2, ([1, 2],))


def burst(
    counts: dict[str, int], *requests: NewRequest, sampled: dict[str, int] | None = None, params: Any = None
) -> Outcome:
    """sampled: newest tokens that only the device knows, one behind those of the requests."""
    batch = PersistentBatch(SHAPE, 32)
    batch.apply(Schedule(new_requests=requests))
    on_device = np.zeros(SHAPE.num_rows, np.int32)
    for source, (name, token) in enumerate((sampled or {}).items()):
        batch.expect(np.array([batch.row(name)]), np.array([source]), np.array([1]))
        batch.num_computed[batch.row(name)] += 1
        on_device[source] = token
    schedule = Schedule(num_scheduled_tokens=counts, num_steps=max(counts.values()))
    step = pack(schedule, batch, Buckets((16,), (4, 8)))
    cache = (jnp.int32(0), *(jnp.zeros((MAX_STEPS, n), jnp.int32) for n in (step.num_rows, step.num_rows, 8)))
    (passes, *logs), newest, tokens = jax.tree.map(np.asarray, program(cache, on_device, step.forward, step.sample))
    assert tokens.shape == (MAX_STEPS, SHAPE.num_rows)
    assert (tokens[:, len(counts) :] == NOT_SAMPLED).all()
    tokens = {name: [t for t in tokens[:, i].tolist() if t != NOT_SAMPLED] for i, name in enumerate(counts)}
    return Outcome(int(passes), *(log[:passes] for log in logs), newest, tokens)


def test_every_row_gets_its_number_of_tokens() -> None:
    out = burst({"a": 3, "b": 1, "c": 5}, request("a", 10), request("b", 20), request("c", 30))
    assert out.passes == 5
    assert out.tokens == {"a": [11, 12, 13], "b": [21], "c": [31, 32, 33, 34, 35]}
    assert out.newest.tolist() == [13, 21, 35, 0, 0, 0, 0, 0]


def test_a_row_that_is_done_is_padding() -> None:
    out = burst({"a": 3, "b": 1, "c": 4}, request("a", 10), request("b", 20), request("c", 30))
    none = SHAPE.num_rows
    assert out.token_rows.tolist() == [[0, 1, 2, none], [0, none, 2, none], [0, none, 2, none], [none, none, 2, none]]
    assert out.positions.tolist() == [[2, 2, 2, 0], [3, 0, 3, 0], [4, 0, 4, 0], [0, 0, 5, 0]]
    assert out.seq_lens[:, :4].tolist() == [[3, 3, 3, 0], [4, 0, 4, 0], [5, 0, 5, 0], [0, 0, 6, 0]]
    assert not out.seq_lens[:, 4:].any()


def test_a_stop_token_ends_its_row_and_the_last_row_the_loop() -> None:
    out = burst({"a": 8, "b": 8}, request("a", 10, stops=(5, 12)), request("b", 20, stops=(25, 90)))
    assert out.tokens == {"a": [11, 12], "b": [21, 22, 23, 24, 25]}
    assert out.passes == 5
    assert out.newest.tolist()[:2] == [12, 25]


def test_a_stop_token_is_no_stop_token_for_others() -> None:
    out = burst({"a": 3, "b": 3}, request("a", 10, stops=(11,)), request("b", 10))
    assert out.tokens == {"a": [11], "b": [11, 12, 13]}


def test_min_tokens_counts_within_a_burst() -> None:
    """One token is there already: the third may not end the row, although it would, the fourth may."""
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=3)
    out = burst({"a": 8}, request("a", 10, stops=(12, 1), params=params))
    assert out.tokens == {"a": [11, 0, 1]}  # 0 is the first of those that are equally bad
    assert out.passes == 3


def test_more_stop_tokens_than_fit_are_left_to_the_host() -> None:
    many = tuple(range(40, 40 + SampleInputs.MAX_STOPS))
    out = burst({"a": 4, "b": 4}, request("a", 10, stops=(12, *many)), request("b", 10, stops=(60, *many)))
    assert out.tokens["a"] == [11, 12]
    assert burst({"b": 4}, request("b", 58, stops=(60, *many))).tokens == {"b": [59, 60, 61, 62]}


def test_numbers_gone_wrong_end_a_row() -> None:
    out = burst({"a": 6, "b": 6}, request("a", BROKEN - 2), request("b", 20))
    assert out.tokens == {"a": [BROKEN - 1, BROKEN, NO_TOKEN], "b": [21, 22, 23, 24, 25, 26]}


def test_it_begins_with_tokens_that_only_the_device_knows() -> None:
    out = burst({"a": 2, "b": 2}, request("a", 10), request("b", 20), sampled={"b": 50})
    assert out.tokens == {"a": [11, 12], "b": [51, 52]}
    assert out.positions.tolist() == [[2, 3, 0, 0], [3, 4, 0, 0]]


@pytest.mark.parametrize("last", [50, NO_TOKEN])
def test_a_row_that_the_step_before_has_ended_takes_no_part(last: int) -> None:
    out = burst({"b": 4, "a": 2}, request("a", 10), request("b", 20, stops=(50,)), sampled={"b": last})
    assert out.tokens == {"b": [], "a": [11, 12]}
    alone = burst({"b": 4}, request("b", 20, stops=(50,)), sampled={"b": last})
    assert alone.passes == 0
    assert alone.newest.tolist()[0] == last


def test_a_prompt_may_end_with_a_stop_token() -> None:
    prompt = NewRequest("a", [1, 2, 50], GREEDY, frozenset({50}), 0, 3, 2, ([1],))
    assert burst({"a": 2}, prompt).tokens == {"a": [51, 52]}
