"""The life of a scheduler with all its checks, for tests that drive it with random events.

In each step the fake runner checks that every request reads exactly its own tokens from the cache; the checks here are
those of the schedule, of the books, and at the end that all requests got the tokens they had to get. A life that runs
ahead plans a step before the one before it is reported; the runner, like a device, runs them in order and knows the
tokens itself.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from fake_runner import FakeRunner, expected_tokens

from noria.cache.layout import blocks_for_request, plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import FinishReason, Request, RequestStatus
from noria.scheduler.policy import Policy, order_key
from noria.scheduler.schedule import Schedule, StepResult
from noria.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40


def until_the_end(request: Request, sampled: list[int]) -> list[int]:
    """Those of a step's tokens that the request takes."""
    stop = next((i for i, token_id in enumerate(sampled) if token_id in request.stop_token_ids), len(sampled))
    return sampled[: stop + 1]


def most_tokens(request: Request) -> int:
    """Prompt and output of a request that no stop token ends."""
    return min(request.num_prompt_tokens + (request.sampling_params.max_tokens or 0), MAX_MODEL_LEN)


@dataclass(frozen=True)
class Flight:
    schedule: Schedule
    requests: dict[str, Request]  # of its ids
    result: StepResult

    def due(self, request: Request) -> int:
        """Tokens that the step samples for the request, as far as the host knows."""
        name = request.request_id
        if self.requests.get(name) is not request or name not in self.result.sampled_token_ids:
            return 0
        return self.schedule.num_scheduled_tokens[name] if self.schedule.is_burst else 1


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
        ahead: bool,
        burst: int,
        knows_stops: bool,
        ranks: int = 1,
    ) -> None:
        """The pool holds one longest request and `spare` blocks. burst: num_scheduler_steps. Pool, max_num_seqs and
        budget are those of each of the ranks."""
        layout = plan_layout(windows)
        num_blocks = blocks_for_request(layout, MAX_MODEL_LEN, block_size, budget) + 1 + spare
        caches = [PagedCache(layout, num_blocks, block_size, enable_prefix_caching=caching) for _ in range(ranks)]
        self.num_usable_blocks = ranks * caches[0].num_usable_blocks
        self.ranks = ranks
        self.scheduler = Scheduler(
            caches,
            max_num_seqs=ranks * max_num_seqs,
            max_num_batched_tokens=ranks * budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            num_scheduler_steps=burst,
        )
        self.order = order_key(policy)
        self.max_num_seqs, self.budget, self.burst = max_num_seqs, budget, burst
        self.most_in_flight = 2 if ahead else 1
        self.runner = FakeRunner(layout, num_blocks, block_size, knows_stops)
        self.all: list[Request] = []
        self.in_flight: deque[Flight] = deque()
        self.must_report = False  # nobody can advance before that
        self.owed_finished: set[str] = set()  # ids the runner knows and must be told to forget
        self.owed_preempted: list[Request] = []  # in a step without tokens
        self.ranks_before: dict[Request, int] = {}
        self.seen: Counter[str] = Counter()  # how often what happened, so that a test can tell it was one

    @property
    def may_plan(self) -> bool:
        return len(self.in_flight) < self.most_in_flight and not self.must_report

    def live(self) -> list[Request]:
        return [request for request in self.all if not request.is_finished]

    def sampling(self, request: Request) -> int:
        """Tokens that the steps in flight sample for the request."""
        return sum(flight.due(request) for flight in self.in_flight)

    def submit(
        self, prompt: list[int], max_tokens: int, salt: str | None, priority: int, name: int, stops: frozenset[int]
    ) -> None:
        """Under the first free id from `name` on, so that ids are used again and again."""
        taken = {request.request_id for request in self.live()}
        request_id = next(str(i) for i in range(name, name + len(taken) + 1) if str(i) not in taken)
        self.seen["id again"] += request_id in self.runner.rows  # of a request that the runner still remembers
        params = SamplingParams(max_tokens=max_tokens)
        key = 0 if salt is None else 1
        request = Request(request_id, prompt, params, key=key, stop_token_ids=stops, cache_salt=salt, priority=priority)
        self.scheduler.add(request)
        self.all.append(request)

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort([request.request_id, "unknown"]) == [request]
        assert request.finish_reason is FinishReason.ABORT
        self.forgotten(request)

    def forgotten(self, request: Request) -> None:
        if request.request_id in self.runner.rows:
            self.owed_finished.add(request.request_id)

    def turn(self) -> None:
        """As an engine does it: plans a step, then reports the one before it; a step that is empty leaves none."""
        keep = self.most_in_flight - 1 if self.plan() else 0
        while len(self.in_flight) > keep:
            self.report()

    def plan(self) -> bool:
        """Schedules and runs a step, which report() completes later. False when it was empty."""
        live = {request.request_id: request for request in self.live()}
        running_before = [request for request in live.values() if request.status is RequestStatus.RUNNING]
        waiting_before = live.keys() - {request.request_id for request in running_before}
        # They end with the token that is being sampled.
        done = {r.request_id for r in running_before if r.num_tokens + self.sampling(r) == most_tokens(r)}
        schedule = self.scheduler.schedule()
        preempted = [request for request in running_before if request.status is RequestStatus.PREEMPTED]
        self.owed_preempted = [request for request in self.owed_preempted if not request.is_finished] + preempted
        self.check_schedule(schedule, live, waiting_before, done, preempted)
        self.seen["preempted"] += len(preempted)
        self.seen["preempted in flight"] += sum(self.sampling(request) > 0 for request in preempted)
        if not schedule.num_scheduled_tokens:
            assert schedule == Schedule()
            assert self.scheduler.update(schedule, StepResult({})) == []
            self.must_report = bool(self.in_flight)
            self.seen["empty"] += bool(live)
            return False
        assert sorted(schedule.finished_ids) == sorted(self.owed_finished)
        assert sorted(schedule.preempted_ids) == sorted(request.request_id for request in self.owed_preempted)
        self.owed_finished.clear()
        self.owed_preempted.clear()
        requests = {name: live[name] for name in schedule.num_scheduled_tokens}
        self.in_flight.append(Flight(schedule, requests, self.runner.step(schedule)))
        self.seen["resumed"] += sum(cached.resumed for cached in schedule.cached_requests)
        self.seen["resumed with hit"] += sum(c.resumed and c.num_computed_tokens > 0 for c in schedule.cached_requests)
        self.seen["new with hit"] += sum(new.num_computed_tokens > 0 for new in schedule.new_requests)
        return True

    def check_schedule(
        self,
        schedule: Schedule,
        live: dict[str, Request],
        waiting_before: set[str],
        done: set[str],
        preempted: list[Request],
    ) -> None:
        tokens = schedule.num_scheduled_tokens
        assert all(count >= 1 for count in tokens.values())
        assert tokens.keys() <= live.keys() - done
        running = [request for request in live.values() if request.status is RequestStatus.RUNNING]
        # The first in order always advances, the others too unless the budget ran out, and those behind are preempted
        # first and admitted last: so nobody starves.
        if live:
            first = min(running, key=self.order).request_id
            assert (first in tokens) != (first in done)
        lost = {request.request_id for request in preempted}
        for rank in range(self.ranks):
            own = {request.request_id for request in running if request.rank == rank}
            in_a_pass = sum(1 if schedule.is_burst else tokens[name] for name in own & tokens.keys())
            assert len(own) <= self.max_num_seqs
            assert in_a_pass <= self.budget
            if in_a_pass < self.budget or schedule.is_burst:
                assert own == own & (tokens.keys() | done - lost)
            self.seen["idle rank"] += bool(tokens) and not own & tokens.keys()
        for request in preempted:
            assert request.request_id not in tokens
            assert request.num_computed_tokens == 0
            assert all(self.order(request) > self.order(other) for other in running if other.rank == request.rank)
        for name in tokens.keys() & waiting_before:
            self.seen["came back elsewhere"] += live[name].rank != self.ranks_before.get(live[name], live[name].rank)
        self.ranks_before = {request: request.rank for request in live.values() if request.scheduled_time is not None}
        admitted = [live[name] for name in waiting_before & tokens.keys()]
        assert not (preempted and admitted)
        left = [live[name] for name in waiting_before - tokens.keys()]
        assert all(self.order(a) < self.order(w) for a in admitted for w in left)
        if schedule.is_burst:
            self.check_burst(schedule, running, waiting=bool(left))
        # The last token is nobody's input.
        assert all(live[name].num_computed_tokens < most_tokens(live[name]) for name in tokens)

    def check_burst(self, schedule: Schedule, running: list[Request], waiting: bool) -> None:
        """Everybody who runs decodes (the runner checks that), or ends with a token in flight."""
        tokens = schedule.num_scheduled_tokens
        assert 1 < max(tokens.values()) == schedule.num_steps <= self.burst
        assert not schedule.new_requests
        assert not any(cached.resumed for cached in schedule.cached_requests)
        for request in running:
            assert request.request_id in tokens or not waiting
            if request.request_id in tokens:
                ends = request.num_computed_tokens + 1 == most_tokens(request)
                assert tokens[request.request_id] == schedule.num_steps or ends
                assert tokens[request.request_id] == schedule.num_steps or not waiting
        self.seen["burst"] += 1
        self.seen["burst of unequal ones"] += len(set(tokens.values())) > 1
        self.seen["shorter burst"] += schedule.num_steps < self.burst
        self.seen["burst while others wait"] += waiting

    def report(self) -> None:
        """Of the oldest step in flight."""
        self.must_report = False
        flight = self.in_flight.popleft()
        sampled = flight.result.sampled_token_ids
        due = {name: request for name, request in flight.requests.items() if name in sampled}
        was_preempted = {name for name, request in due.items() if request.status is RequestStatus.PREEMPTED}
        self.seen["dropped"] += sum(request.is_finished for request in due.values())
        expected = [
            (request, until_the_end(request, sampled[name])) for name, request in due.items() if not request.is_finished
        ]
        self.seen["burst cut"] += flight.schedule.is_burst and any(
            len(taken) < flight.due(request) for request, taken in expected
        )
        assert self.scheduler.update(flight.schedule, flight.result) == expected
        for request, new in expected:
            assert request.output_token_ids[-len(new) :] == new
            self.seen["kept"] += request.request_id in was_preempted
            if request.is_finished:
                self.forgotten(request)
                self.seen["finished while preempted"] += request.request_id in was_preempted
        for request in self.live():
            assert request.num_computed_tokens < request.num_tokens + self.sampling(request)
            assert request.num_cached_tokens < request.num_prompt_tokens

    def check_books(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats
        assert stats.num_running + stats.num_waiting == len(self.live())
        assert stats.cache.num_used + stats.cache.num_free == self.num_usable_blocks
        if not self.live():
            assert stats.cache.num_free == self.num_usable_blocks

    def complete(self) -> None:
        """Runs until all are finished, and looks at what everybody got."""
        while self.in_flight:
            self.report()
        most_turns = 4 * MAX_MODEL_LEN * len(self.live())  # each step advances the first in order, or completes it
        while self.live():
            assert (most_turns := most_turns - 1) >= 0
            self.turn()
            self.check_books()
        self.turn()  # what is still in flight was computed for nobody
        assert not self.in_flight
        assert not self.scheduler.has_unfinished
        for request in self.all:
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Nothing but the prompt decides the tokens: not batch mates, chunks, preemptions or prefix hits."""
        output = request.output_token_ids
        assert output == expected_tokens(request.prompt_token_ids, len(output), request.key)
        if request.finish_reason is FinishReason.STOP:
            assert request.stop_reason == output[-1]
            assert output[-1] in request.stop_token_ids
            output = output[:-1]
        elif request.finish_reason is FinishReason.LENGTH:
            assert request.num_tokens == most_tokens(request)
        else:
            assert request.finish_reason is FinishReason.ABORT
        assert request.stop_token_ids.isdisjoint(output)
