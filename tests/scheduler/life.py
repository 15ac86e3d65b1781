"""The life of a scheduler with all its checks, for tests that drive it with random events.

In each step the fake runner checks that every request reads exactly its own tokens from the cache; the checks here are
those of the schedule, of the books, and at the end that all requests got the tokens they had to get.
"""

from __future__ import annotations

from collections import Counter

from fake_runner import FakeRunner, expected_tokens

from noria.cache.layout import blocks_for_request, plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import FinishReason, Request, RequestStatus
from noria.scheduler.policy import Policy, order_key
from noria.scheduler.schedule import Schedule, StepResult
from noria.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40


class Life:
    def __init__(
        self,
        *,
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
        self.seen: Counter[str] = Counter()  # how often what happened, so that a test can tell it was one

    def live(self) -> list[Request]:
        return [request for request in self.all if not request.is_finished]

    def submit(self, prompt: list[int], max_tokens: int, salt: str | None, priority: int, name: int) -> None:
        """Under the first free id from `name` on, so that ids are used again and again."""
        taken = {request.request_id for request in self.live()}
        request_id = next(str(i) for i in range(name, name + len(taken) + 1) if str(i) not in taken)
        self.seen["id again"] += request_id in self.runner.rows  # of a request that the runner still remembers
        params = SamplingParams(max_tokens=max_tokens)
        key = 0 if salt is None else 1
        request = Request(request_id, prompt, params, key=key, cache_salt=salt, priority=priority)
        self.scheduler.add(request)
        self.all.append(request)

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort([request.request_id, "unknown"]) == [request]
        assert request.finish_reason is FinishReason.ABORT
        if request.request_id in self.runner.rows:
            self.owed_finished.add(request.request_id)

    def plan(self) -> None:
        """Schedules and runs a step; report() completes it."""
        live = {request.request_id: request for request in self.live()}
        waiting = {name for name, request in live.items() if request.status is not RequestStatus.RUNNING}
        schedule = self.scheduler.schedule()
        assert bool(schedule.num_scheduled_tokens) == bool(live)
        if live:
            assert set(schedule.finished_ids) == self.owed_finished
            self.owed_finished.clear()
            self.check_schedule(schedule, live, waiting)
            self.in_flight = schedule, self.runner.step(schedule)
            self.seen["preempted"] += len(schedule.preempted_ids)
            self.seen["resumed"] += sum(cached.resumed for cached in schedule.cached_requests)
            self.seen["resumed with hit"] += sum(
                c.resumed and c.num_computed_tokens > 0 for c in schedule.cached_requests
            )
            self.seen["new with hit"] += sum(new.num_computed_tokens > 0 for new in schedule.new_requests)
        else:
            assert schedule == Schedule()
            self.in_flight = schedule, StepResult({})

    def check_schedule(self, schedule: Schedule, live: dict[str, Request], waiting_before: set[str]) -> None:
        tokens = schedule.num_scheduled_tokens
        assert sum(tokens.values()) <= self.budget
        assert all(count >= 1 for count in tokens.values())
        assert tokens.keys() <= live.keys()
        running = [request for request in live.values() if request.status is RequestStatus.RUNNING]
        assert len(running) <= self.max_num_seqs
        # The first in order always advances, the others too unless the budget ran out, and those behind are preempted
        # first and admitted last: so nobody starves.
        assert min(running, key=self.order).request_id in tokens
        if sum(tokens.values()) < self.budget:
            assert {request.request_id for request in running} == tokens.keys()
        for name in schedule.preempted_ids:
            assert name not in tokens
            assert live[name].status is RequestStatus.PREEMPTED
            assert live[name].num_computed_tokens == 0
            assert all(self.order(live[name]) > self.order(request) for request in running)
        admitted = [live[name] for name in waiting_before & tokens.keys()]
        assert not (schedule.preempted_ids and admitted)
        left = [live[name] for name in waiting_before - tokens.keys()]
        assert all(self.order(a) < self.order(w) for a in admitted for w in left)

    def report(self) -> None:
        assert self.in_flight is not None
        (schedule, result), self.in_flight = self.in_flight, None
        for request, new in self.scheduler.update(schedule, result):
            assert result.sampled_token_ids[request.request_id] == new
            assert request.output_token_ids[-len(new) :] == new
            if request.is_finished:
                assert request.finish_reason is FinishReason.LENGTH
                self.owed_finished.add(request.request_id)
        for request in self.live():
            assert request.num_computed_tokens < request.num_tokens
            assert request.num_cached_tokens < request.num_prompt_tokens

    def check_books(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats
        assert stats.num_running + stats.num_waiting == len(self.live())
        assert stats.cache.num_used + stats.cache.num_free == self.cache.num_usable_blocks
        if not self.live():
            assert stats.cache.num_free == self.cache.num_usable_blocks

    def complete(self) -> None:
        """Runs until all are finished, and looks at what everybody got."""
        if self.in_flight is not None:
            self.report()
        most_steps = 2 * MAX_MODEL_LEN * len(self.live())  # each step advances the first in order
        while self.live():
            assert (most_steps := most_steps - 1) >= 0
            self.plan()
            self.report()
            self.check_books()
        assert not self.scheduler.has_unfinished
        for request in self.all:
            # Nothing but the prompt decides the tokens: not batch mates, chunks, preemptions or prefix hits.
            right = expected_tokens(request.prompt_token_ids, request.num_output_tokens, request.key)
            assert request.output_token_ids == right
            if request.finish_reason is FinishReason.LENGTH:
                most = min(request.sampling_params.max_tokens or 0, MAX_MODEL_LEN - request.num_prompt_tokens)
                assert request.num_output_tokens == most
