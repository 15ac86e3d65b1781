"""From options to an engine core that is ready to serve: everything that happens before the first request."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from noria.batch.buckets import rows_with_drafts
from noria.cache.paged_cache import PagedCache
from noria.config import EngineConfig, ResolvedConfig
from noria.engine.core import EngineCore
from noria.engine.devices import make_engine_mesh
from noria.engine.draft_model import DraftModelProposer
from noria.engine.eagle3 import Eagle3Proposer, HeadFiles, open_head
from noria.engine.loading import (
    ProgressBar,
    build_draft_runner,
    build_runner,
    check_memory,
    find_draft,
    find_model,
    load_weights_or_shapes,
    no_bar,
)
from noria.engine.speculation import Speculation
from noria.engine.structured import StructuredRequests
from noria.errors import ConfigError
from noria.grammar.compiler import GrammarCompiler
from noria.runner.capture import CaptureReport
from noria.runner.memory import MemoryPlan
from noria.runner.runner import ModelRunner
from noria.runner.stored import DRAFT_FOLDER, StoredPrograms
from noria.scheduler.scheduler import Scheduler
from noria.spec.ngram import NgramProposer
from noria.text.tokenizer import Tokenizer, load_tokenizer, no_tokenizer
from noria.weights.base import Checkpoint
from noria.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from noria.engine.hosts.lead import Hosts, LeadRunner

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartupReport:
    programs: int  # device programs that serving needs
    compiled: int  # of those, not found in the persistent cache
    load_s: float  # reading and placing the weights
    warmup_s: float  # compiling or fetching the programs
    memory: MemoryPlan

    def with_draft(self, draft: StartupReport) -> StartupReport:
        """The sums with those of a draft model; the memory plan stays that of the target."""
        return StartupReport(
            self.programs + draft.programs,
            self.compiled + draft.compiled,
            self.load_s + draft.load_s,
            self.warmup_s + draft.warmup_s,
            self.memory,
        )

    def __str__(self) -> str:
        return (
            f"loaded in {self.load_s:.1f} s; {self.programs} programs ready in {self.warmup_s:.1f} s "
            f"({self.compiled} compiled)\n{self.memory}"
        )


@dataclass(frozen=True)
class Engine:
    """A started engine and what its fronts need to know."""

    config: ResolvedConfig
    core: EngineCore
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    report: StartupReport
    hosts: Hosts | None = None  # the others, where several run the engine

    def check_hosts(self) -> None:
        """Raises EngineDeadError when one of them is gone."""
        if self.hosts is not None:
            self.hosts.check()


def start(config: EngineConfig, progress: ProgressBar | None = None) -> Engine:
    """Resolves, loads, plans memory and compiles. What is wrong with the options shows before anything is compiled.

    Raises ConfigError or WeightsError.
    """
    return _start(config, progress, programs_only=False)


def compile_programs(config: EngineConfig, progress: ProgressBar | None = None) -> StartupReport:
    """Fills the persistent compile cache with what `start` would need, without reading the weights.

    Raises ConfigError or WeightsError like start, and ConfigError when the persistent compile cache is turned off.
    """
    if config.compile_cache_dir == "":
        raise ConfigError(
            'compile_cache_dir "" turns the compile cache off, so there is nothing to fill; name a folder'
        )
    if config.programs_dir is not None:
        raise ConfigError("programs_dir: here programs are compiled, not fetched; leave it out")
    engine = _start(config, progress, programs_only=True)
    engine.core.close()
    return engine.report


def _start(config: EngineConfig, progress: ProgressBar | None, *, programs_only: bool) -> Engine:
    if config.nnodes == 1:
        return _begin(config, progress, None, programs_only)
    if config.node_rank:
        raise ConfigError(
            f"node_rank {config.node_rank} follows host 0 and answers nothing itself: start it with noria serve, or "
            "with noria.follow in Python"
        )
    from noria.engine.hosts.lead import Hosts  # which needs a package that one host does not
    from noria.engine.hosts.world import check_share

    check_share(config)
    bar = progress or no_bar
    with bar(f"waiting for {config.nnodes - 1} other hosts at {config.master_addr}:{config.master_port}"):
        hosts = Hosts.meet(config)
    try:
        return _begin(config, progress, hosts, programs_only)
    except BaseException as error:
        hosts.fail(error)
        raise


def _begin(config: EngineConfig, progress: ProgressBar | None, hosts: Hosts | None, programs_only: bool) -> Engine:
    bar = progress or no_bar
    if hosts is None:
        mesh, make = make_engine_mesh(config), ModelRunner
    else:
        from noria.engine.hosts.lead import LeadRunner
        from noria.engine.hosts.world import greet

        with hosts.guard():
            mesh, make = make_engine_mesh(config), partial(LeadRunner, hosts)
            greet(mesh)
    path = find_model(config)
    config, stored = _with_stored_programs(config)
    with ExitStack() as files:
        checkpoint = files.enter_context(open_checkpoint(path, config_only=config.load_format == "dummy"))
        tokenizer = _tokenizer(config, path)
        head = open_head(config, files)
        runner = build_runner(make, config, checkpoint, mesh, tokenizer.vocab_size, head)
        if stored is not None:
            stored.check(runner.origin)
        check_memory(runner, checkpoint)
        resolved, vocab_size, draft = runner.config, runner.model.config.vocab_size, None
        if (options := resolved.speculation) is not None and options.method == "draft_model":
            make_draft = make if hosts is None else partial(make, is_draft=True)
            draft = _draft(make_draft, tokenizer, runner, bar, programs_only)
        report = _make_ready(runner, checkpoint, head, bar, programs_only, stored)
        eos = _eos_token_ids(checkpoint, tokenizer, vocab_size)
    report = report if draft is None else report.with_draft(draft[1])
    _log.info("%s", report)
    structured = StructuredRequests(GrammarCompiler(tokenizer, eos), vocab_size)
    scheduler = _scheduler(resolved, runner, report.memory)
    speculation = _speculation(resolved, runner, scheduler, draft and draft[0])
    core = EngineCore(runner, scheduler, structured, speculation, resolved.async_scheduling)
    return Engine(resolved, core, tokenizer, vocab_size, eos, report, hosts)


def _speculation(
    config: ResolvedConfig, runner: ModelRunner, scheduler: Scheduler, draft: DraftModelProposer | None
) -> Speculation:
    if (options := config.speculation) is None:
        return Speculation(None)
    proposer = draft or NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
    if runner.head is not None:
        proposer = Eagle3Proposer(runner, scheduler.reserve)
    return Speculation(proposer, options.num_speculative_tokens)


def _make_ready(
    runner: ModelRunner,
    checkpoint: Checkpoint,
    head: HeadFiles | None,
    bar: ProgressBar,
    programs_only: bool,
    stored: StoredPrograms | None = None,
) -> StartupReport:
    """Loads or describes the weights, divides the memory that is left, and compiles, or fetches what is stored."""
    begin = time.perf_counter()
    plan = _load(runner, checkpoint, head, bar, programs_only)
    load_s = time.perf_counter() - begin
    capture = _prepare(runner, plan.num_blocks, bar, programs_only, stored)
    return StartupReport(capture.programs, capture.compiled, load_s, capture.seconds, plan)


def _load(
    runner: ModelRunner, checkpoint: Checkpoint, head: HeadFiles | None, bar: ProgressBar, programs_only: bool
) -> MemoryPlan:
    """Returns the plan with what the weights really take."""
    here = lambda: load_weights_or_shapes(runner, checkpoint, head, programs_only=programs_only, bar=bar)
    if runner.config.nnodes > 1:
        return _leading(runner).load(here, programs_only=programs_only)
    here()
    return runner.profile_run()


def _prepare(
    runner: ModelRunner, num_blocks: int, bar: ProgressBar, programs_only: bool, stored: StoredPrograms | None
) -> CaptureReport:
    def here() -> CaptureReport:
        runner.initialize_kv_cache(num_blocks, allocate=not programs_only)
        with bar("compiling") as show:
            return runner.capture_model(show, stored)

    return _leading(runner).prepare(num_blocks, here) if runner.config.nnodes > 1 else here()


def _leading(runner: ModelRunner) -> LeadRunner:
    from noria.engine.hosts.lead import LeadRunner

    assert isinstance(runner, LeadRunner)
    return runner


def _draft(
    make: Callable[..., ModelRunner], tokenizer: Tokenizer, target: ModelRunner, bar: ProgressBar, programs_only: bool
) -> tuple[DraftModelProposer, StartupReport]:
    """The draft model, ready to serve, before the target divides the memory. tokenizer: the target's."""
    path, folder = find_draft(target.config), target.config.programs_dir
    stored = None if folder is None else StoredPrograms.open(Path(folder) / DRAFT_FOLDER)
    with open_checkpoint(path, config_only=target.config.load_format == "dummy") as checkpoint:
        needed = tokenizer.vocab_size or target.model.config.vocab_size
        runner = build_draft_runner(make, checkpoint, target, needed, stored and stored.num_blocks)
        if tokenizer.vocab_size and not tokenizer.has_same_tokens(load_tokenizer(path)):
            raise ConfigError(
                f"speculative_config: the draft model {runner.config.model} has another tokenizer than the model; "
                "choose a draft model of the same family"
            )
        if stored is not None:
            stored.check(runner.origin)
        report = _make_ready(runner, checkpoint, None, bar, programs_only, stored)
    c = runner.config
    cache = lambda: PagedCache(runner.layout, report.memory.num_blocks, c.block_size, c.enable_prefix_caching)
    return DraftModelProposer(runner, [cache() for _ in range(c.num_ranks)]), report


def _with_stored_programs(config: EngineConfig) -> tuple[EngineConfig, StoredPrograms | None]:
    """programs_dir says how large the cache is. Raises ConfigError when there are no programs, or for another size."""
    if config.programs_dir is None:
        return config, None
    stored, asked = StoredPrograms.open(Path(config.programs_dir)), config.num_blocks_override
    if asked not in (None, stored.num_blocks):
        raise ConfigError(
            f"num_blocks_override ({asked}) is not the {stored.num_blocks} blocks that the programs in programs_dir "
            "take; leave it out"
        )
    return dataclasses.replace(config, num_blocks_override=stored.num_blocks), stored


def _scheduler(config: ResolvedConfig, runner: ModelRunner, plan: MemoryPlan) -> Scheduler:
    caching, lookahead = config.enable_prefix_caching, int(runner.head is not None)
    cache = lambda: PagedCache(runner.layout, plan.num_blocks, config.block_size, caching, lookahead)
    return Scheduler(
        [cache() for _ in range(config.num_ranks)],
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        num_scheduler_steps=config.num_scheduler_steps,
        rows_with_drafts=rows_with_drafts(config),
        most_model_len=config.most_model_len,
    )


def _tokenizer(config: EngineConfig, model: Path) -> Tokenizer:
    if config.skip_tokenizer_init:
        return no_tokenizer()
    return load_tokenizer(Path(config.tokenizer) if config.tokenizer else model, config.chat_template)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text, by the tokenizer or by the model's generation config."""
    declared = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    return tuple(sorted({*tokenizer.eos_token_ids, *(i for i in ids if 0 <= i < vocab_size)}))
