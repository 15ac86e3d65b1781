"""Random lives of a scheduler: crowds, follow-ups, aborts at any moment, re-used ids, small pools, mixed groups; with
the plain loop and with one that runs a step ahead, step by step and in bursts.

Once with hypothesis, which finds the smallest example of what goes wrong, and once with long dense seeded lives.
"""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from life import MAX_MODEL_LEN, Life

from noria.scheduler.policy import Policy

PROMPTS = [list(range(start, start + MAX_MODEL_LEN)) for start in (0, 5, 0)]  # the first and the last share a prefix
PROMPTS[2][9:] = range(30, 30 + MAX_MODEL_LEN - 9)
WINDOWS = [[None], [6], [1], [None, 6], [None, 3, 3, 11], [None, None, 5, 5, 5]]
SALTS = [None, None, "tenant"]
STOPS = [frozenset(), frozenset({3, 17, 29, 41}), frozenset(range(0, 50, 4))]  # of 50 tokens


class SchedulerMachine(RuleBasedStateMachine):
    life: Life | None = None

    @initialize(
        options=st.fixed_dictionaries(
            {
                "windows": st.sampled_from(WINDOWS),
                "block_size": st.sampled_from([1, 3, 4]),
                "spare": st.integers(0, 20),
                "max_num_seqs": st.sampled_from([1, 3, 6]),
                "budget": st.sampled_from([1, 5, 12, 24, 50]),
                "caching": st.booleans(),
                "policy": st.sampled_from(["fcfs", "priority"]),
                "ahead": st.booleans(),
                "burst": st.sampled_from([1, 1, 2, 5, 16]),
                "knows_stops": st.booleans(),
                "ranks": st.sampled_from([1, 1, 2, 3]),
            }
        )
    )
    def start(self, options: dict) -> None:
        self.life = Life(**options)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        lengths=st.lists(st.integers(1, MAX_MODEL_LEN - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 30),
        salt=st.sampled_from(SALTS),
        priority=st.integers(0, 2),
        name=st.integers(0, 11),
        stops=st.sampled_from(STOPS),
    )
    def add(
        self,
        prompt: list[int],
        lengths: list[int],
        max_tokens: int,
        salt: str | None,
        priority: int,
        name: int,
        stops: frozenset[int],
    ) -> None:
        for length in lengths:
            self.life.submit(prompt[:length], max_tokens, salt, priority, name, stops)

    @precondition(lambda self: self.life.all)
    @rule(data=st.data(), more=st.lists(st.integers(0, 3), max_size=2), max_tokens=st.integers(1, 10))
    def follow_up(self, data: st.DataObject, more: list[int], max_tokens: int) -> None:
        """The next turn of a conversation: the prompt contains what an earlier request generated."""
        before = data.draw(st.sampled_from(self.life.all))
        prompt = [*before.token_ids, *more][: MAX_MODEL_LEN - 1]
        self.life.submit(prompt, max_tokens, before.cache_salt, before.priority, 0, before.stop_token_ids)

    @precondition(lambda self: self.life.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.life.abort(data.draw(st.sampled_from(self.life.live())))

    @precondition(lambda self: self.life.may_plan)
    @rule()
    def plan(self) -> None:
        self.life.plan()

    @precondition(lambda self: self.life.in_flight)
    @rule()
    def report(self) -> None:
        self.life.report()

    @precondition(lambda self: self.life.may_plan)
    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.life.turn()

    @rule()
    def forget_prefixes(self) -> None:
        self.life.scheduler.reset_prefix_cache()
        assert self.life.scheduler.stats.cache.num_cached == 0

    @invariant()
    def books_agree(self) -> None:
        if self.life is not None:
            self.life.check_books()

    def teardown(self) -> None:
        if self.life is not None:
            self.life.complete()


SchedulerMachine.TestCase.settings = hypothesis.settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def random_request(rng: random.Random, life: Life, name: int) -> None:
    """Mostly short prompts, so that the requests grow and meet; two in five continue an earlier one."""
    prompt, salt = rng.choice(PROMPTS), rng.choice(SALTS)
    if life.all and rng.random() < 0.4:
        before = rng.choice(life.all[-10:])
        prompt, salt = [*before.token_ids, *rng.choices(range(4), k=2)], before.cache_salt
    length = rng.choice([MAX_MODEL_LEN - 1, rng.randint(1, 15), rng.randint(1, 15)])
    life.submit(prompt[:length], rng.randint(1, 30), salt, rng.randint(0, 2), name, rng.choice(STOPS))


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(("caching", "policy"), [(True, "fcfs"), (False, "fcfs"), (True, "priority")])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("burst", [1, 6])
def test_long_life(windows: list[int | None], caching: bool, policy: Policy, ahead: bool, burst: int) -> None:
    """150 requests, always a queue, over a pool that holds a few; some are aborted in flight and submitted again."""
    life = long_life(windows, caching, policy, ahead, burst)
    assert life.seen["id again"] > 0
    assert (life.seen["new with hit"] > 5) == caching
    assert life.seen["dropped"] > 0
    for what in ("burst", "shorter burst", "burst cut", "burst while others wait"):
        assert (life.seen[what] > 0) == (burst > 1), what
    if windows != [1]:  # a request that needs one block at a time never gets in anybody's way
        assert life.seen["preempted"] > 2
        assert life.seen["resumed"] > 2
        assert (life.seen["resumed with hit"] > 0) == caching or burst > 1
        assert (life.seen["preempted in flight"] > 0) == ahead
        assert (life.seen["kept"] > 0) == ahead


@pytest.mark.parametrize("windows", [[None], [None, 3, 3, 11]], ids=str)
@pytest.mark.parametrize("burst", [1, 6])
def test_long_life_on_ranks(windows: list[int | None], burst: int) -> None:
    """The same with three ranks: requests find their prefixes, come back on other ranks, and leave ranks idle."""
    life = long_life(windows, caching=True, policy="fcfs", ahead=True, burst=burst, ranks=3)
    for what in ("new with hit", "preempted", "resumed", "came back elsewhere", "idle rank", "dropped", "kept"):
        assert life.seen[what] > 0, what
    assert (life.seen["burst"] > 0) == (burst > 1)


def long_life(
    windows: list[int | None], caching: bool, policy: Policy, ahead: bool, burst: int, ranks: int = 1
) -> Life:
    rng = random.Random(f"{windows} {caching} {policy}")
    life = Life(
        windows=windows,
        block_size=4,
        spare=4,
        max_num_seqs=6 if ranks == 1 else 3,
        budget=14,
        caching=caching,
        policy=policy,
        ahead=ahead,
        burst=burst,
        knows_stops=caching,
        ranks=ranks,
    )
    while len(life.all) < 150:
        while len(life.live()) < rng.randint(4, 12) * (1 + ranks) // 2:
            random_request(rng, life, rng.randint(0, 11))
        planned = life.plan()
        if rng.random() < 0.1:
            request = rng.choice(life.live())
            life.abort(request)
            random_request(rng, life, int(request.request_id))
        while len(life.in_flight) > (1 if ahead and planned else 0):
            life.report()
        life.check_books()
    life.complete()
    return life
