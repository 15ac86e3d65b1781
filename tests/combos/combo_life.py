"""Engines of the combination tests, and the life they lead: arrivals, steps, aborts, and the checks in between."""

from __future__ import annotations

import dataclasses
import random
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from combo_jobs import MAX_MODEL_LEN, Job

from noria.batch.inputs import NOT_SAMPLED
from noria.batch.pack import StepInputs
from noria.config import EngineConfig, StructuredOutputsParams
from noria.engine import startup
from noria.engine.admission import Admission
from noria.engine.core import EngineCore
from noria.engine.draft_model import DraftModelProposer
from noria.engine.request import FinishReason, Request, RequestStatus
from noria.engine.structured import StructuredRequests
from noria.grammar.compiler import GrammarCompiler
from noria.grammar.matcher import Matcher
from noria.runner import runner as runner_module
from noria.step.decode import DecodeProgram
from noria.step.draft_head import HeadPrograms
from noria.step.programs import StepPrograms
from noria.text.tokenizer import Tokenizer, Vocabulary


@dataclasses.dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    states: tuple[int, ...]  # of each token a checksum of the hidden state it was sampled from, to the last bit
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: tuple[Any, ...] = ()
    prompt_logprobs: tuple[Any, ...] = ()

    def begun(self, count: int, prompt: tuple[Any, ...]) -> Answer:
        """What is right of it for a request that was given up after `count` tokens and some of `prompt`."""
        own = self.prompt_logprobs
        known = tuple(None if got is None else mine for got, mine in zip(prompt, own, strict=True))
        first = lambda values: values[:count]
        return Answer(first(self.token_ids), first(self.states), FinishReason.ABORT, None, first(self.logprobs), known)


@jax.jit
def checksums(hidden: jax.Array) -> jax.Array:
    """[R, E] -> [R] int32: sums of the bits, weighted by odd numbers, so that each bit and its place count. Integers
    add up to the same in any order and in any program."""
    bits = jax.lax.bitcast_convert_type(hidden, jnp.dtype(f"uint{8 * hidden.dtype.itemsize}")).astype(jnp.uint32)
    weights = jnp.arange(hidden.shape[1], dtype=jnp.uint32) * jnp.uint32(2 * 0x9E3779B1 % 2**32) + jnp.uint32(1)
    return jax.lax.bitcast_convert_type(jnp.sum(bits * weights, axis=1, dtype=jnp.uint32), jnp.int32)


class SlowGrammars(GrammarCompiler):
    """Takes so long that requests have to be held for a few steps."""

    def _compile(self, params: StructuredOutputsParams) -> Matcher:
        time.sleep(0.01)
        return super()._compile(params)


class WatchedDecode(DecodeProgram):
    """Keeps the checksums of the hidden states of every pass: behind the tokens, which get twice the room."""

    def __init__(self, steps: StepPrograms, max_steps: int, head: HeadPrograms | None) -> None:
        super().__init__(steps, 2 * max_steps, head)

    def _sample(self, weights: Any, hidden: jax.Array, inputs: Any, burst: Any) -> Any:
        after = super()._sample(weights, hidden, inputs, burst)
        sums = jnp.where(burst.alive, checksums(hidden), NOT_SAMPLED)
        return dataclasses.replace(after, tokens=after.tokens.at[self.max_steps // 2 + burst.step].set(sums))


def _unwatched(make: Callable[..., Any]) -> Callable[..., Any]:
    """A draft model's burst is as it is: nobody looks at its hidden states."""

    def made(*arguments: Any) -> Any:
        with unittest.mock.patch.object(runner_module, "DecodeProgram", DecodeProgram):
            return make(*arguments)

    return made


class InFlight:
    """The runner, with a look at every step while it is on the device and the host does not know its result."""

    def __init__(self, runner: Any, meanwhile: Callable[[StepInputs, np.ndarray, np.ndarray], None]) -> None:
        self._runner = runner
        self._meanwhile = meanwhile
        self.execute_model = runner.execute_model
        self.clock = runner.clock

    def sample_tokens(self, masks: Any = None) -> Any:
        inputs, outputs = self._runner._executed
        sampled = self._runner.sample_tokens(masks)
        if inputs.is_burst:
            tokens, sums = np.split(np.asarray(outputs), 2)
            sampled = dataclasses.replace(sampled, token_ids=tokens)
            if inputs.places is not None:
                tokens, sums = tokens[:, inputs.places[0]], sums[:, inputs.places[0]]
        elif inputs.places is not None:
            # There are hidden states for the largest bucket of each rank.
            shape = self._runner.shape
            rank, row = np.divmod(inputs.places, inputs.num_rows // shape.num_ranks)
            sums = np.asarray(checksums(outputs))[rank * shape.num_logit_rows + row]
            tokens = np.where(inputs.places >= 0, np.asarray(sampled.token_ids)[inputs.places], NOT_SAMPLED)
        else:
            tokens, sums = np.zeros((1, len(outputs)), int), np.asarray(checksums(outputs))[None]
        self._meanwhile(inputs, sums, tokens != NOT_SAMPLED)
        return sampled


def _numbers(text: str) -> list[int]:
    """Token ids from their numbers."""
    return [int(word) for word in text.split()]


def _speaking(vocab_size: int) -> Tokenizer:
    """For grammars: each token but the first three is a character or two of ASCII."""
    numbers = range(vocab_size - 3)
    words = [bytes([32 + n]) if n < 95 else bytes([97 + n % 26, 48 + n % 10]) for n in numbers]
    pieces = (b"<pad>", b"<s>", b"</s>", *words)
    return Tokenizer(Vocabulary(encode_text=lambda text: [], pieces=pieces, special_ids=frozenset({0, 1, 2})))


def _is_structured(request: Request) -> bool:
    return request.sampling_params.structured_outputs is not None


def _is_penalized(request: Request) -> bool:
    """Shaped for another reason than its grammar."""
    return dataclasses.replace(request.sampling_params, structured_outputs=None).is_shaped


class Rig:
    """An engine at the level of its core: token ids, steps, and nothing that hides when what happens."""

    def __init__(self, model: Path, compile_cache_dir: str, **options: Any) -> None:
        fixed = {"skip_tokenizer_init": True, "load_format": "dummy", "seed": 7, "max_model_len": MAX_MODEL_LEN}
        given = {"dtype": "float32", "strict_compile": True, "compile_cache_dir": compile_cache_dir} | options
        unwatched = _unwatched(startup._draft)
        with (
            unittest.mock.patch.object(runner_module, "DecodeProgram", WatchedDecode),
            unittest.mock.patch.object(startup, "_draft", unwatched),
        ):
            engine = startup.start(EngineConfig.from_options(model=str(model), **fixed, **given))
        self.core: EngineCore = engine.core
        self.scheduler = engine.core.scheduler
        self.runner = engine.core.runner
        self.core.runner = InFlight(self.runner, self._meanwhile)  # pyright: ignore[reportAttributeAccessIssue]
        self.admission = Admission(
            Tokenizer(Vocabulary(encode_text=_numbers, pieces=(b"",) * engine.vocab_size, special_ids=frozenset())),
            vocab_size=engine.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=engine.eos_token_ids,
            seed=0,
        )
        grammars = SlowGrammars(_speaking(engine.vocab_size), engine.eos_token_ids)
        self.core.structured = StructuredRequests(grammars, engine.vocab_size)
        self.num_bursts = self.num_held = self.num_divided = 0
        self._action: Callable[[], None] | None = None
        self._by_id: dict[str, Request] = {}
        self._states: dict[Request, list[int]] = {}

    def submit(self, name: str, job: Job) -> list[Request]:
        """The requests (params.n of them) are called name:0, name:1 and so on."""
        prompt, params = list(job.prompt), job.params
        requests = self.admission.requests(name, prompt, params, cache_salt=job.cache_salt, priority=job.priority)
        for request in requests:
            self._add(request)
        return requests

    def _add(self, request: Request) -> None:
        self.core.add(request)
        self.num_held += self.is_held(request)
        self._by_id[request.request_id] = request
        self._states[request] = []

    def answer(self, request: Request) -> Answer:
        token_ids = tuple(request.output_token_ids)
        # One that was given up during a step has a state whose token it never got.
        states = tuple(self._states[request][: len(token_ids)])
        figures = tuple(request.logprobs), tuple(request.prompt_logprobs)
        return Answer(token_ids, states, request.finish_reason, request.stop_reason, *figures)

    def is_held(self, request: Request) -> bool:
        """Until its grammar is compiled."""
        return request in self.core.structured._compiling

    def alone(self, job: Job) -> list[Answer]:
        """The answers of a job that has the engine to itself, one sequence after the other."""
        answers = []
        for request in self.admission.requests("alone", list(job.prompt), job.params):
            self._add(request)
            while self.scheduler.has_unfinished:
                self.core.step()
            answers.append(self.answer(request))
        return answers

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """One step; `meanwhile` runs when the device has the step and its result is not yet known."""
        self._action = meanwhile
        for request, token_ids in self.core.step():
            assert token_ids or request.is_finished
            assert request.output_token_ids[-len(token_ids) :] == token_ids or not token_ids
        self.scheduler.check_integrity()

    def _meanwhile(self, inputs: StepInputs, sums: np.ndarray, passes: np.ndarray) -> None:
        """sums, passes: [passes, rows] checksums, and whether they have a meaning."""
        for index in np.flatnonzero(inputs.samples):
            request_id = self.runner.batch.request_ids[inputs.rows[index]]
            self._states[self._by_id[request_id]] += sums[passes[:, index], index].tolist()
        self.num_bursts += inputs.is_burst
        self.num_divided += len(inputs.executions) > 1
        if self._action is not None:
            self._action()

    def check_idle(self) -> None:
        """Nothing waits, nothing is lost, nothing was compiled while serving."""
        assert not self.scheduler.has_unfinished
        self.scheduler.check_integrity()
        stats = self.scheduler.stats.cache
        assert (stats.num_used, stats.num_free) == (0, stats.num_blocks)
        assert self.runner.compiles_after_warmup == 0
        proposer = self.core.speculation._proposer
        if isinstance(proposer, DraftModelProposer):
            assert not proposer._sequences
            assert proposer._runner.compiles_after_warmup == 0
            for cache in proposer._caches:
                cache.check_integrity()
                assert cache.stats.num_used == 0

    def close(self) -> None:
        self.core.structured.compiler.close()
        self.core.speculation.close()
        self.runner.close()


class Life:
    """Runs jobs through a rig in an order and with accidents that a seed decides."""

    def __init__(self, rig: Rig, jobs: list[Job], seed: str, crowd: int) -> None:
        """crowd: up to so many jobs at a time are unfinished, so more than max_num_seqs of them also have to wait."""
        self.rig = rig
        self.done: list[tuple[Job, list[Request]]] = []  # in the order of arrival
        self.seen: Counter[str] = Counter()  # how often what happened, so that a test can tell that it did
        self._rng = random.Random(seed)
        self._pending = list(reversed(jobs))
        self._live: dict[str, tuple[Job, list[Request]]] = {}
        self._crowd = crowd
        self._names = 0

    def run(self) -> None:
        """Until the last answer. The rig is idle before and after."""
        rng = self._rng
        while self._pending or self._live:
            for _ in range(rng.choice([0, 0, 1, 1, 2, self._crowd]) if self._live else 1):
                if len(self._live) < self._crowd:
                    self._arrive()
            if rng.random() < 0.06:
                self._abort()
            self.rig.step(self._abort if rng.random() < 0.06 else None)
            self.seen["steps"] += 1
            self._live = {
                name: (job, requests)
                for name, (job, requests) in self._live.items()
                if not all(request.is_finished for request in requests)
            }
        for _, requests in self.done:
            self.seen["structured"] += sum(map(_is_structured, requests))
            self.seen["penalized"] += sum(_is_penalized(request) for request in requests)
            self.seen["logprobs"] += sum(bool(request.logprobs) for request in requests)
            self.seen["prompt logprobs"] += sum(
                bool(request.prompt_logprobs) and not request.needs_prompt_logprobs for request in requests
            )
            self.seen["preempted"] += sum(request.num_preemptions for request in requests)
            self.seen["cached tokens"] += sum(request.num_cached_tokens for request in requests)
        self.seen["bursts"], self.seen["held"] = self.rig.num_bursts, self.rig.num_held
        self.seen["divided steps"] = self.rig.num_divided
        stats = self.rig.core.speculation.stats
        self.seen["drafts"], self.seen["right drafts"] = stats.num_draft_tokens, stats.num_accepted_tokens
        self.seen["wrong drafts"] = stats.num_draft_tokens - stats.num_accepted_tokens
        self.rig.check_idle()

    def _arrive(self, name: str | None = None) -> None:
        if not self._pending:
            return
        job = self._pending.pop()
        if name is None:
            name, self._names = str(self._names), self._names + 1
        requests = self.rig.submit(name, job)
        self._live[name] = (job, requests)
        self.done.append((job, requests))

    def _abort(self) -> None:
        """Gives up one job in whatever state it is; often its id comes back before the next step, for another job."""
        if not self._live or self.seen["aborted"] > len(self.done) / 4:
            return
        by_state: dict[str, list[str]] = {}
        for name, (_, requests) in self._live.items():
            by_state.setdefault(self._state(requests[0]), []).append(name)
        state = min(by_state, key=lambda state: (self.seen[f"aborted {state}"], state))  # the rare ones, too
        name = self._rng.choice(by_state[state])
        self.seen["aborted"] += 1
        self.seen[f"aborted {state}"] += 1
        _, requests = self._live.pop(name)
        self.rig.core.abort([request.request_id for request in requests])
        if self._rng.random() < 0.6:
            self.seen["same id again"] += bool(self._pending)
            self._arrive(name)

    def _state(self, request: Request) -> str:
        if request.status is RequestStatus.RUNNING and request.num_computed_tokens < request.num_prompt_tokens:
            return "in prefill"
        return "held" if self.rig.is_held(request) else request.status.value
