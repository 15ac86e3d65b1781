"""Warm-up: every program is compiled before the first request, from the same inputs that serving packs."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.config import SamplingParams
from noria.errors import CompileError, ConfigError
from noria.observe.compiles import CompileCount, CompileWatch
from noria.runner.resident import give_back_memory
from noria.scheduler.schedule import NewRequest, Schedule

_log = logging.getLogger(__name__)
_WARM_UP_PARAMS = SamplingParams()
_SHAPED = SamplingParams(logprobs=0)


def lowering(function: Callable[..., Any], **options: Any) -> Callable[..., jax.stages.Lowered]:
    """As jax.jit(function, **options).lower, of a function of its own each time.

    So what tracing leaves in JAX's caches goes with what was lowered, megabytes for a program, and what JAX has
    compiled for one engine never keeps a program of another from its compile cache.
    """
    return lambda *arguments: jax.jit(partial(function), **options).lower(*arguments)


@dataclass(frozen=True)
class CaptureReport:
    programs: int
    compiled: int  # of those, not found in the persistent cache
    seconds: float


class Programs:
    """The compiled programs by (name, bucket). After warm-up a miss is an error or at least a warning, and counted."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._compiled: dict[Hashable, Any] = {}
        self._watch = CompileWatch()
        self.after_warmup = CompileCount()
        self.start = CompileCount()

    def __len__(self) -> int:
        return len(self._compiled)

    def capture(
        self,
        jobs: dict[Hashable, Callable[[], Any]],
        threads: int,
        progress: Callable[[int, int], None] | None = None,
        load: Callable[[Hashable, Any], Any] | None = None,
    ) -> CaptureReport:
        """Runs the jobs, which lower one program each, and compiles it; in parallel.

        load: fetches a program by its key and what was lowered, in place of compiling it.
        """
        begin = time.perf_counter()
        give_back_memory()  # of imports and of loading

        def run(key: Hashable, job: Callable[[], Any]) -> tuple[Any, CompileCount]:
            count = CompileCount()
            with self._watch.watch(count):
                program = job().compile() if load is None else load(key, job())
            if count.compiled:
                give_back_memory()
            return program, count

        pool = ThreadPoolExecutor(threads, thread_name_prefix="noria-compile")
        try:
            futures = {pool.submit(run, key, job): key for key, job in jobs.items()}
            for done, future in enumerate(as_completed(futures), start=1):
                self._compiled[futures[future]], count = future.result()
                self.start.programs += count.programs
                self.start.cache_hits += count.cache_hits
                if progress is not None:
                    progress(done, len(jobs))
        finally:
            # After a failure or an interrupt nobody waits for what is still in the queue.
            pool.shutdown(wait=False, cancel_futures=True)
        give_back_memory()
        return CaptureReport(len(jobs), self.start.compiled, time.perf_counter() - begin)

    def call(self, key: Hashable, job: Callable[[], Any], *arguments: Any) -> Any:
        """Runs the program `key`; `job` lowers it should warm-up have missed it.

        Raises CompileError in strict mode when anything had to compile.
        """
        before = self.after_warmup.programs
        with self._watch.watch(self.after_warmup):
            program = self._compiled.get(key)
            if program is None:
                if self._strict:
                    self.after_warmup.programs += 1
                    raise CompileError(f"program {key} was not compiled at start")
                program = self._compiled[key] = job().compile()
            result = program(*arguments)
        if self.after_warmup.programs != before:
            shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(arguments[-1:])]
            _log.warning("compiled after warm-up: program %s, inputs %s", key, shapes)
            if self._strict:
                raise CompileError(f"program {key} compiled something after warm-up, inputs {shapes}")
        return result

    def close(self) -> None:
        self._watch.close()


def made_up_steps(
    shape: BatchShape, buckets: Buckets, max_model_len: int, max_num_batched_tokens: int, num_scheduler_steps: int
) -> Iterator[StepInputs]:
    """One step per bucket, as `pack` would make it for requests that fill the bucket, and one burst per request bucket
    when there can be any, and one that is shaped; block ids are all null blocks. max_num_batched_tokens: of a rank.

    Where there is a long shape, the token buckets are filled in both."""
    shapes = [(shape, shape.most_model_len or max_model_len)]
    if shape.long is not None:
        shapes.append((shape.long, max_model_len))
    for each, longest in shapes:
        for size in buckets.tokens:
            total = min(size, max_num_batched_tokens, each.num_rows * longest)
            full, rest = divmod(total, longest)
            counts = [longest] * full + [rest] * (rest > 0)
            # A row that is only a part of a bucket is long by what it has computed before.
            before = longest - rest if each is shape.long and not full else 0
            yield made_up_step(counts, shape, buckets, max_model_len, num_computed=before)
    for size in sorted({*buckets.with_drafts} - {*buckets.requests}):
        ones, drafts = [1] * shape.num_rows, size - shape.num_rows
        for params in (_WARM_UP_PARAMS, _SHAPED):
            yield made_up_step(ones, shape, buckets, max_model_len, params=params, num_drafts=drafts)
    num_steps = min(num_scheduler_steps, shape.most_model_len or num_scheduler_steps)
    for size in buckets.requests:
        yield made_up_step([1] * size, shape, buckets, max_model_len)
        yield made_up_step([1] * size, shape, buckets, max_model_len, params=_SHAPED)
        if num_steps > 1:
            yield made_up_step([1] * size, shape, buckets, max_model_len, num_steps=num_steps)


def made_up_step(
    counts: Sequence[int],
    shape: BatchShape,
    buckets: Buckets,
    max_model_len: int,
    *,
    num_computed: int = 0,
    num_steps: int = 1,
    blocks: MadeUpBlocks | None = None,
    params: SamplingParams = _WARM_UP_PARAMS,
    num_drafts: int = 0,
) -> StepInputs:
    """A step in which each of len(counts) requests of every rank computes so many tokens after num_computed ones.

    num_steps: more than 1 for a burst, in which each computes one token as many times. blocks: gives every request
    blocks of its own, as long as there are some; None: all are the null block. num_drafts: of all requests of a rank.
    """
    batch = PersistentBatch(shape, max_model_len)
    requests = [
        NewRequest(
            request_id=f"{rank} {index}",
            token_ids=[0] * (num_computed + count),
            sampling_params=params,
            stop_token_ids=frozenset(),
            key=0,
            num_prompt_tokens=num_computed + count,
            num_computed_tokens=num_computed,
            block_ids=tuple(
                blocks.take(num_computed + count + num_steps - 1) if blocks else [] for _ in range(shape.num_groups)
            ),
            rank=rank,
        )
        for rank in range(shape.num_ranks)
        for index, count in enumerate(counts)
    ]
    each = [*counts] * shape.num_ranks
    scheduled = {request.request_id: count * num_steps for request, count in zip(requests, each)}
    drafts: dict[str, list[int]] = {}
    for rank, index in itertools.product(range(shape.num_ranks), range(num_drafts)):
        request_id = f"{rank} {index % len(counts)}"
        drafts.setdefault(request_id, []).append(0)
        scheduled[request_id] += 1
    schedule = Schedule(
        new_requests=tuple(requests), num_scheduled_tokens=scheduled, num_steps=num_steps, draft_token_ids=drafts
    )
    batch.apply(schedule)
    return pack(schedule, batch, buckets)


class MadeUpBlocks:
    """Block ids 1, 2, ... of a pool, beginning again when they run out."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: of the pool, the null block included."""
        self._block_size = block_size
        self._ids = itertools.cycle(range(1, num_blocks))

    def take(self, num_tokens: int) -> list[int]:
        return list(itertools.islice(self._ids, -(-num_tokens // self._block_size)))


def use_compile_cache(folder: str) -> None:
    """Makes JAX keep every compiled program in `folder`, and find it there at the next start; "" turns that off.

    Raises ConfigError when the folder cannot be made.
    """
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"compile_cache_dir {folder}: {error.strerror}; choose another folder") from None
    if jax.config.values["jax_compilation_cache_dir"] != (folder or None):
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", folder or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
