"""Which requests advance by how many tokens in a step.

There are no phases. Each step lets the computed tokens of the requests catch up with the tokens they have, the running
ones first, within a budget of tokens; a prompt longer than what is left of it is computed in chunks. When the cache
runs out of blocks the request that comes last gives its own back and starts over later (recompute), so the first one
always advances and every request ends.

When everybody decodes and nobody can join, a step may be a burst: several forward passes, made by the device alone.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from noria.cache.layout import BlockIds, blocks_for_request
from noria.cache.paged_cache import PagedCache
from noria.engine.request import FinishReason, Request, RequestStatus
from noria.errors import ConfigError, RequestError
from noria.scheduler.plan import Plan, cut_counts, new_request
from noria.scheduler.policy import Policy, WaitingQueue, order_key
from noria.scheduler.ranks import Ranks
from noria.scheduler.results import take_prompt_logprobs, take_tokens
from noria.scheduler.schedule import CachedRequest, Schedule, StepResult
from noria.scheduler.stats import SchedulerStats

Drafts = Mapping[str, list[int]]
_NO_DRAFTS: Drafts = MappingProxyType({})


class Scheduler:
    """Owns the queues and, through its caches, the blocks. The loop is: schedule(), run the step, update()."""

    def __init__(
        self,
        cache: PagedCache | Sequence[PagedCache],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = "fcfs",
        num_scheduler_steps: int = 1,
        rows_with_drafts: int = 0,
        most_model_len: int | None = None,
    ) -> None:
        """cache: one, or one for each rank, which share max_num_seqs and max_num_batched_tokens in equal parts.
        num_scheduler_steps: most forward passes of a burst; 1 for none. rows_with_drafts: most
        requests and drafts of a rank together in a step that has drafts. most_model_len: as far as a burst may go.

        Raises ConfigError when the cache cannot hold one request of max_model_len tokens.
        """
        self._ranks = ranks = Ranks(cache, max_num_seqs, max_num_batched_tokens)
        chunk, first = min(ranks.max_num_batched_tokens, max_model_len), ranks.caches[0]
        needed = blocks_for_request(first.layout, max_model_len, first.block_size, chunk)
        if needed > (usable := first.num_usable_blocks):
            raise ConfigError(
                f"the cache has {usable} blocks, but one request of max_model_len ({max_model_len}) "
                f"tokens needs {needed}; lower max_model_len or give the cache more memory"
            )
        self._max_model_len = max_model_len
        self._max_chunk = chunk
        self._num_scheduler_steps = num_scheduler_steps
        self._rows_with_drafts = rows_with_drafts
        self._most_model_len = max_model_len if most_model_len is None else most_model_len
        self._order = order_key(policy)
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._waiting = WaitingQueue(self._order)
        self._held: dict[str, Request] = {}  # not yet in the queue: they wait for something that is not ready
        self._running: list[Request] = []  # in the order of the policy
        self._known: set[str] = set()  # ids whose state the runner keeps
        self._finished_ids: list[str] = []  # known ones that ended since the last step
        self._preempted_ids: list[str] = []  # since the last step
        self._in_flight: deque[tuple[Schedule, Plan]] = deque()
        self._num_arrivals = 0
        self._num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def can_advance(self) -> bool:
        """Whether there is a request that need not wait for anything but its turn."""
        return bool(self._running) or len(self._waiting) > 0

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(self.num_running, self.num_waiting, self._num_preemptions, self._ranks.stats)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep their blocks, which no new request will find."""
        for cache in self._ranks.caches:
            cache.reset_prefix_cache()

    def add(self, request: Request, *, hold: bool = False) -> None:
        """Queues a request; with hold it is passed over until `release`, which gives it the place of its arrival.

        Raises RequestError when its id is in use or it does not fit into max_model_len.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use; choose another or abort that request first")
        if not 0 < request.num_tokens < self._max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {request.num_tokens} tokens; it must have at least 1 "
                f"and fewer than max_model_len ({self._max_model_len})"
            )
        request.arrival = self._num_arrivals
        max_tokens = request.sampling_params.max_tokens
        room = self._max_model_len - request.num_prompt_tokens
        request.max_num_tokens = request.num_prompt_tokens + (room if max_tokens is None else min(room, max_tokens))
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if hold:
            self._held[request.request_id] = request
        else:
            self._waiting.push(request)

    @property
    def running(self) -> Sequence[Request]:
        """In the order of the policy; not to be modified."""
        return self._running

    def request(self, request_id: str) -> Request:
        """An unfinished one."""
        return self._requests[request_id]

    def release(self, request: Request) -> None:
        """Queues a request that was held."""
        self._waiting.push(self._held.pop(request.request_id))

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests in whatever state, also while a step is in flight, and returns them. Ignores unknown ids.

        The finish reason becomes ABORT, unless the caller has finished the request already (for a stop string, say).
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if self._ranks.has_table(request):
                self._running.remove(request)
            elif request_id in self._held:
                del self._held[request_id]
            else:
                self._waiting.remove(request)
            if not request.is_finished:
                request.finish(FinishReason.ABORT)
            self._forget(request)
            aborted.append(request)
        return aborted

    def _forget(self, request: Request) -> None:
        """Of a finished request that is out of both queues."""
        request_id = request.request_id
        del self._requests[request_id]
        if self._ranks.has_table(request):
            self._ranks.leave(request)
        if request_id in self._preempted_ids:
            self._preempted_ids.remove(request_id)
        if request_id in self._known:
            self._known.remove(request_id)
            self._finished_ids.append(request_id)

    def schedule(self, drafts: Drafts = _NO_DRAFTS) -> Schedule:
        """The next step; one step before it may still be in flight, that is, not yet reported to update().

        drafts: by the ids of requests that run, decode, and whose tokens are all known: guesses at what follows, no
        more than max_num_tokens - 1 - num_tokens. They are verified if there is room: nobody is preempted for them. A
        step with drafts must be reported before the next is planned, because only its result says who got how many.
        Empty (no tokens) only when there is no unfinished request, or when nobody can advance before the step in flight
        is reported. Finished and preempted ids wait for the next step that has tokens, so an empty Schedule need not be
        run or reported. Raises RuntimeError when two steps are in flight, or one with drafts, or one while preempted
        ids wait.
        """
        # A preempted request may come back only when the step in flight, which was planned before, is done with it.
        blocked = self._preempted_ids or (self._in_flight and self._in_flight[0][1].drafts)
        if len(self._in_flight) > 1 or (self._in_flight and blocked):
            raise RuntimeError("schedule() was called before the oldest step was reported to update()")
        if self._in_flight and len(self._waiting):
            self._commit(self._in_flight[0][1].filling)
        if drafts and not self._has_room_for({request_id: len(each) for request_id, each in drafts.items()}):
            drafts = _NO_DRAFTS
        num_steps = 1 if drafts else self._burst_length()
        step = Plan(num_steps, self._ranks.budgets(num_steps), self._ranks.caches[0].block_size)
        step.drafts_left = self._ranks.room_for_drafts(self._rows_with_drafts)
        self._schedule_running(step, drafts)
        if num_steps == 1 and not step.preempted:
            self._schedule_waiting(step)
        if not step.num_tokens:
            return Schedule()
        schedule = Schedule(
            new_requests=tuple(step.new),
            cached_requests=tuple(step.cached),
            num_scheduled_tokens=step.num_tokens,
            num_steps=num_steps,
            draft_token_ids=step.drafts,
            finished_ids=tuple(self._finished_ids),
            preempted_ids=tuple(self._preempted_ids),
        )
        self._finished_ids.clear()
        self._preempted_ids.clear()
        self._in_flight.append((schedule, step))
        return schedule

    def _commit(self, requests: Iterable[Request]) -> None:
        """Lets requests that are admitted from now on find what these computed, or will have before they read it."""
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                self._ranks.caches[request.rank].commit(request)

    def _burst_length(self) -> int:
        """How many forward passes the step makes: several when all that run decode, nobody can join them, and there is
        room for all their tokens. As many as the longest of them has use for; while others wait for a place, as many as
        the shortest has. None beyond most_model_len, and none while one that runs is shaped: what the sampler then
        keeps from token to token, and what it reports of each, is the business of single steps."""
        most = self._num_scheduler_steps
        if most == 1 or max(self._ranks.num_running) > self._ranks.max_num_batched_tokens:
            return 1
        if any(r.num_tokens_to_compute - r.num_computed_tokens > 1 for r in self._running) or self._can_admit():
            return 1
        if any(r.is_shaped for r in self._running):
            return 1
        # What is left of them: 0 for one that ends with the token that is being sampled.
        left = [(request, request.max_num_tokens - 1 - request.num_computed_tokens) for request in self._running]
        limit = min if len(self._waiting) else max
        num_steps = min(most, limit((count for _, count in left), default=1))
        # Of a request that goes further than that, what is left until there.
        room = [self._most_model_len - request.num_computed_tokens for request, _ in left]
        num_steps = min([num_steps, *(near for near, (_, count) in zip(room, left) if near < count)])
        while num_steps > 1 and not self._ranks.have_room_to_grow([(r, min(count, num_steps)) for r, count in left]):
            num_steps //= 2
        return max(num_steps, 1)

    def reserve(self, wanted: Mapping[str, int]) -> dict[str, tuple[int, BlockIds]]:
        """Makes room for drafts before they are made; wanted: how many, by request, see schedule(). To be called right
        before it. Returns how many can be verified, and the new blocks; nothing if there is no room."""
        counts = dict[str, int]()
        for rank, most in enumerate(self._ranks.room_for_drafts(self._rows_with_drafts)):
            counts |= cut_counts({name: n for name, n in wanted.items() if self._requests[name].rank == rank}, most)
        if not counts or not self._has_room_for(counts):
            return {}
        return {name: (n, self._ranks.allocate(self._requests[name], 1 + n) or ()) for name, n in counts.items()}

    def _has_room_for(self, counts: Mapping[str, int]) -> bool:
        """Whether all that run can go on and verify so many drafts."""
        growth = lambda r: r.num_tokens_to_compute - r.num_computed_tokens + counts.get(r.request_id, 0)
        return self._ranks.have_room_to_grow([(r, growth(r)) for r in self._running])

    def _can_admit(self) -> bool:
        """Whether the first that waits has a place."""
        if (request := self._waiting.peek()) is None:
            return False
        places = self._ranks.places_for(request, self._running, self._ranks.budgets(1))
        return any(self._ranks.caches[rank].has_room(request, hit, self._max_chunk) for rank, hit in places)

    def _schedule_running(self, step: Plan, drafts: Drafts) -> None:
        """The running requests are kept in order, so a victim (the last of a rank) was never scheduled in this step
        before."""
        index, budgets = 0, step.budgets
        while index < len(self._running):
            request = self._running[index]
            budget = budgets[request.rank]
            if step.num_steps > 1:
                num_tokens = min(step.num_steps, request.max_num_tokens - 1 - request.num_computed_tokens)
            else:
                num_tokens = request.num_tokens_to_compute - request.num_computed_tokens
            if num_tokens > budget:
                num_tokens = budget
            if num_tokens == 0:  # it ends with the token that is being sampled, or its rank has no budget left
                index += 1
                continue
            most_drafts = min(step.drafts_left[request.rank], budget - num_tokens)
            guesses = drafts.get(request.request_id, [])[: max(most_drafts, 0)]
            num_tokens += len(guesses)
            while (new_block_ids := self._ranks.allocate(request, num_tokens)) is None:
                victim = self._ranks.pop_last(self._running, request.rank)
                self._preempt(victim, step)
                if victim is request:
                    break
            else:
                step.cached.append(CachedRequest(request.request_id, request.num_computed_tokens, new_block_ids))
                step.take(request, num_tokens, guesses)
                index += 1

    def _preempt(self, request: Request, step: Plan) -> None:
        self._ranks.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(request)
        step.preempted = True
        self._preempted_ids.append(request.request_id)

    def _schedule_waiting(self, step: Plan) -> None:
        """Strictly in order: a request that finds no room holds up those behind it, so that none waits forever."""
        while (request := self._waiting.peek()) is not None:
            for rank, hit in self._ranks.places_for(request, self._running, step.budgets):
                num_tokens = min(request.num_tokens - hit.num_tokens, step.budgets[rank])
                if (block_ids := self._ranks.enter(rank, request, hit, num_tokens, self._max_chunk)) is not None:
                    break
            else:
                return
            self._waiting.remove(request)
            bisect.insort(self._running, request, key=self._order)
            if request.num_preemptions == 0:
                request.num_cached_tokens = hit.num_tokens
                request.scheduled_time = time.perf_counter()
            request.num_computed_tokens = hit.num_tokens
            request.status = RequestStatus.RUNNING
            if request.request_id in self._known:
                step.cached.append(
                    CachedRequest(
                        request.request_id, hit.num_tokens, block_ids, True, list(request.token_ids), request.rank
                    )
                )
            else:
                step.new.append(new_request(request, block_ids))
                self._known.add(request.request_id)
            step.take(request, num_tokens, [])

    def update(self, schedule: Schedule, result: StepResult) -> list[tuple[Request, list[int]]]:
        """Takes what a step yielded; returns the requests that got tokens, with these. Finished ones are freed.

        Tokens of a request whose prompt is not yet computed are dropped, as are results of requests that were aborted
        or ended since the schedule, even when their id has come back. A request that was preempted since then keeps its
        tokens. Raises RuntimeError when `schedule` is not the oldest in flight, or when a request that goes on did not
        get as many tokens as it is due for.
        """
        if not schedule.num_scheduled_tokens:
            return []
        if not self._in_flight or self._in_flight[0][0] is not schedule:
            raise RuntimeError("update() was called with a schedule that is not the oldest in flight")
        step = self._in_flight.popleft()[1]
        self._commit(step.filling)
        for request in step.scoring:
            take_prompt_logprobs(request, result)
        outputs, any_finished = [], False
        for request, due in step.sampling:
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_placeholders -= due
            is_waiting = request.status is RequestStatus.PREEMPTED
            num_drafts = len(schedule.draft_token_ids.get(request.request_id, ()))
            outputs.append((request, taken := take_tokens(request, result, due - num_drafts, due)))
            if num_drafts and not request.is_finished:
                request.num_computed_tokens -= due - len(taken)  # what was computed behind a wrong draft
            # With the tokens that were sampled and computed in one burst, or that a block was waiting for.
            cache = self._ranks.caches[request.rank]
            is_new = due > 1 or cache.lookahead
            if is_new and not is_waiting and request.finish_reason is not FinishReason.ERROR:
                cache.commit(request)
            if request.finish_reason is not None:
                any_finished = True
                if is_waiting:
                    self._waiting.remove(request)
                self._forget(request)
        if any_finished:
            self._running = [request for request in self._running if not request.is_finished]
        return outputs

    def check_integrity(self) -> None:
        """Raises RuntimeError when queues, cache and pool do not agree, or blocks are lost while nothing runs."""
        self._ranks.check_integrity(self._running)
        waiting = [*self._waiting, *self._held.values()]
        if {r.request_id for r in (*self._running, *waiting)} != set(self._requests):
            raise RuntimeError("the queues do not hold exactly the unfinished requests")
        if len(self._running) + len(waiting) != len(self._requests):
            raise RuntimeError("a request is in both queues")
        if sorted(self._running, key=self._order) != self._running:
            raise RuntimeError("the running requests are out of order")
        if any(r.status is not RequestStatus.RUNNING for r in self._running):
            raise RuntimeError("a running request has another status")
        if any(r.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting):
            raise RuntimeError("a waiting request has another status")
        sampling: Counter[int] = Counter()
        for _, step in self._in_flight:
            for request, due in step.sampling:
                sampling[request.arrival] += due
        for request in (*self._running, *waiting):
            if request.num_placeholders != sampling[request.arrival]:
                raise RuntimeError(f"request {request.request_id} waits for tokens that no step in flight samples")
            if request.num_computed_tokens > request.num_tokens_to_compute:
                raise RuntimeError(f"request {request.request_id} has more tokens computed than it needs")
