"""Random lives of a scheduler: adds, aborts at any moment, re-used ids, small pools, prefix cache, mixed groups.

After each step the fake runner has checked that every request reads exactly its own tokens from the cache; the rules
here check the schedule itself, the books, and at the end that all requests got the tokens they had to get.
"""

from __future__ import annotations

import hypothesis
from fake_runner import FakeRunner, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.cache.layout import blocks_for_request, plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import FinishReason, Request, RequestStatus
from noria.scheduler.policy import Policy, order_key
from noria.scheduler.schedule import Schedule, StepResult
from noria.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40
PROMPTS = [list(range(start, start + MAX_MODEL_LEN)) for start in (0, 5, 0)]  # two requests in three share a prefix
PROMPTS[2][9:] = range(30, 30 + MAX_MODEL_LEN - 9)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([[None], [6], [1], [None, 6], [None, 3, 3, 11], [None, None, 5, 5, 5]]),
        block_size=st.sampled_from([1, 3, 4]),
        spare=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(
        self,
        windows: list[int | None],
        block_size: int,
        spare: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        policy: Policy,
    ) -> None:
        """The pool holds one longest request and `spare` blocks."""
        layout = plan_layout(windows)
        num_blocks = blocks_for_request(layout, MAX_MODEL_LEN, block_size, budget) + 1 + spare
        self.cache = PagedCache(layout, num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
        )
        self.order = order_key(policy)
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.runner = FakeRunner(layout, num_blocks, block_size)
        self.all: list[Request] = []
        self.in_flight: tuple[Schedule, StepResult] | None = None
        self.owed_finished: set[str] = set()  # ids the runner knows and must be told to forget

    def live(self) -> list[Request]:
        return [request for request in self.all if not request.is_finished]

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 30),
        salt=st.sampled_from([None, None, "tenant"]),
        priority=st.integers(0, 2),
        name=st.integers(0, 11),
    )
    def add(self, prompt: list[int], length: int, max_tokens: int, salt: str | None, priority: int, name: int) -> None:
        taken = {request.request_id for request in self.live()}
        request_id = next(str(i) for i in range(name, name + 100) if str(i) not in taken)
        request = Request(
            request_id,
            prompt[:length],
            SamplingParams(max_tokens=max_tokens),
            key=0 if salt is None else 1,
            cache_salt=salt,
            priority=priority,
        )
        self.scheduler.add(request)
        self.all.append(request)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live()))
        assert self.scheduler.abort([request.request_id, "unknown"]) == [request]
        assert request.finish_reason is FinishReason.ABORT
        if request.request_id in self.runner.rows:
            self.owed_finished.add(request.request_id)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        self.plan()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def update(self) -> None:
        self.report()

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.plan()
            self.report()

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def forget_prefixes(self) -> None:
        self.cache.reset_prefix_cache()
        assert self.cache.stats.num_cached == 0

    def plan(self) -> None:
        live = {request.request_id: request for request in self.live()}
        waiting_before = {name for name, request in live.items() if request.status is not RequestStatus.RUNNING}
        schedule = self.scheduler.schedule()
        tokens = schedule.num_scheduled_tokens
        assert bool(tokens) == bool(live)
        if not tokens:
            assert schedule == Schedule()
            self.in_flight = schedule, StepResult({})
            return
        assert sum(tokens.values()) <= self.budget
        assert all(count >= 1 for count in tokens.values())
        assert tokens.keys() <= live.keys()
        assert set(schedule.finished_ids) == self.owed_finished
        self.owed_finished.clear()
        running = [r for r in live.values() if r.status is RequestStatus.RUNNING]
        assert len(running) <= self.max_num_seqs
        # The first in order always advances, and whoever was left out comes after all that were scheduled, unless the
        # budget ran out: so nobody starves.
        assert min(running, key=self.order).request_id in tokens
        if sum(tokens.values()) < self.budget:
            assert {r.request_id for r in running} == tokens.keys()
        for name in schedule.preempted_ids:
            assert name not in tokens
            assert live[name].status is RequestStatus.PREEMPTED
            assert all(self.order(live[name]) > self.order(r) for r in running)
        if schedule.preempted_ids:
            assert not waiting_before & tokens.keys()
        left = [r for r in live.values() if r.status is not RequestStatus.RUNNING and r.request_id in waiting_before]
        admitted = [live[name] for name in waiting_before & tokens.keys()]
        assert all(self.order(a) < self.order(w) for a in admitted for w in left)
        self.in_flight = schedule, self.runner.step(schedule)

    def report(self) -> None:
        assert self.in_flight is not None
        schedule, result = self.in_flight
        self.in_flight = None
        outputs = self.scheduler.update(schedule, result)
        for request, new in outputs:
            assert result.sampled_token_ids[request.request_id] == new
            assert request.output_token_ids[-len(new) :] == new
            if request.is_finished:
                assert request.finish_reason is FinishReason.LENGTH
                self.owed_finished.add(request.request_id)
        for request in self.live():
            assert request.num_computed_tokens < request.num_tokens
            if request.status is RequestStatus.RUNNING:
                limit = (request.num_prompt_tokens - 1) // self.cache.block_size * self.cache.block_size
                assert request.num_cached_tokens <= limit

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        stats = self.scheduler.stats
        assert stats.num_running + stats.num_waiting == len(self.live())
        assert stats.cache.num_used + stats.cache.num_free == self.cache.num_usable_blocks
        if not self.live():
            assert stats.cache.num_free == self.cache.num_usable_blocks
        for request in self.all:
            # Nothing but the prompt decides the tokens: not batch mates, chunks, preemptions or prefix hits.
            right = expected_tokens(request.prompt_token_ids, request.num_output_tokens, request.key)
            assert request.output_token_ids == right

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.report()
        # Each step advances the first request in order by a token at least.
        most_steps = sum(2 * MAX_MODEL_LEN for _ in self.live())
        while self.live():
            assert (most_steps := most_steps - 1) >= 0
            self.plan()
            self.report()
        self.books_agree()
        assert not self.scheduler.has_unfinished
        for request in self.all:
            if request.finish_reason is FinishReason.LENGTH:
                most = min(request.sampling_params.max_tokens or 0, MAX_MODEL_LEN - request.num_prompt_tokens)
                assert request.num_output_tokens == most


SchedulerMachine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_lives = SchedulerMachine.TestCase
