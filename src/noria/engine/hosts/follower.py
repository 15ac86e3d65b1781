"""A host that follows: the runner of host 0 once more, driven by what host 0 says."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import msgspec

from noria.config import EngineConfig
from noria.engine.devices import make_engine_mesh
from noria.engine.eagle3 import HeadFiles, open_head
from noria.engine.hosts.link import (
    BEAT_S,
    GOODBYE_S,
    NOTICE_S,
    SILENCE_S,
    STUCK_S,
    Link,
    bound_the_end,
    end_process,
)
from noria.engine.hosts.meeting import join
from noria.engine.hosts.messages import (
    Beat,
    Draft,
    Execute,
    Failed,
    Load,
    Loaded,
    Message,
    Prepare,
    Prepared,
    Sample,
    Stop,
    Take,
    masks_of,
    schedule_of,
)
from noria.engine.hosts.world import become_one, check_share, greet
from noria.engine.loading import (
    build_draft_runner,
    build_runner,
    check_memory,
    find_draft,
    find_model,
    load_weights_or_shapes,
)
from noria.errors import ConfigError, EngineDeadError, NoriaError, named
from noria.runner.results import SampledTokens
from noria.runner.runner import ModelRunner
from noria.weights.base import Checkpoint
from noria.weights.checkpoint import open_checkpoint


def follow(config: EngineConfig, note: Callable[[str], None] = lambda text: None, *, patient: bool = False) -> None:
    """Does what host 0 does until that one ends: weights, cache and every step, on the devices of this host.

    config: that of host 0 but for node_rank and what may differ, such as where the model lies. note: shows a line.
    patient: signals are treated as patient_signals says, once host 0 is found; only the main thread can do that.
    Raises ConfigError when the hosts do not find each other in time or do not fit each other, whatever went wrong at
    host 0, and EngineDeadError when a host is gone. Should this thread wait for ever for a host that is gone, the
    process ends with HOST_LOST.
    """
    if not config.node_rank:
        raise ConfigError("node_rank 0 is the host that leads; one that follows has a node_rank of 1 to nnodes - 1")
    check_share(config)
    note(f"host {config.node_rank} of {config.nnodes} looks for host 0 at {config.master_addr}:{config.master_port}")
    link = join(config)
    with patient_signals(note) if patient else contextlib.nullcontext():
        _follow(config, _Lead(link), note)


def _follow(config: EngineConfig, lead: _Lead, note: Callable[[str], None]) -> None:
    try:
        become_one(config)
        _Follower(config, lead, note).run()
        jax.distributed.shutdown()
    except BaseException as error:
        # A host that is gone may have broken a call into the device: host 0 knows better.
        is_strange = isinstance(error, Exception) and not isinstance(error, NoriaError)
        if is_strange and (reason := lead.reason(NOTICE_S)) is not None:
            raise reason from error
        lead.fail(error)
        raise
    finally:
        lead.close()


class _Lead:
    """Host 0 as the others see it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: queue.SimpleQueue[Message | NoriaError] = queue.SimpleQueue()
        self._closing = threading.Event()
        threading.Thread(target=self._read, name="noria-host-0", daemon=True).start()
        threading.Thread(target=self._beat, name="noria-host-beats", daemon=True).start()

    def messages(self) -> Iterator[Message]:
        """Up to Stop. Raises what went wrong at host 0, or EngineDeadError when it is gone."""
        while True:
            message = self._messages.get()
            if isinstance(message, NoriaError):
                raise message
            if isinstance(message, Stop):
                return
            yield message

    def reason(self, timeout_s: float) -> NoriaError | None:
        """What went wrong at host 0, or with it, if that becomes known in time."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(message, NoriaError):
                    return message
        return None

    def send(self, message: Message) -> None:
        self._link.send(message)

    def fail(self, error: BaseException) -> None:
        """Tells host 0 that this one ends with an error."""
        reason = str(error) if isinstance(error, NoriaError) else f"{type(error).__name__}: {error}"
        kind = type(error).__name__ if isinstance(error, NoriaError) else EngineDeadError.__name__
        with contextlib.suppress(OSError):
            self._link.send(Failed(kind, reason))

    def close(self) -> None:
        self._closing.set()
        self._link.close()

    def _read(self) -> None:
        try:
            for message in self._link.messages():
                if isinstance(message, Failed):
                    return self._lose(named(message.kind, message.reason))
                if not isinstance(message, Beat):
                    self._messages.put(message)
                if isinstance(message, Stop):
                    stuck = EngineDeadError(f"this host did not end within {GOODBYE_S:g} s of host 0")
                    return self._watch_the_end(stuck, GOODBYE_S)
            reason = "it has ended"
        except TimeoutError:
            reason = f"it has been silent for {SILENCE_S:g} s"
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        return self._lose(EngineDeadError(f"host 0 is gone: {reason}"))

    def _lose(self, error: NoriaError) -> None:
        if not self._closing.is_set():
            self._messages.put(error)
            bound_the_end(error)
            self._watch_the_end(error, STUCK_S)

    def _watch_the_end(self, error: NoriaError, limit_s: float) -> None:
        if not self._closing.wait(limit_s):
            end_process(error)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._link.beat()


class _Follower:
    """Its runners are made at the first word about weights, which says what host 0 alone knows."""

    def __init__(self, config: EngineConfig, lead: _Lead, note: Callable[[str], None]) -> None:
        self._config = config
        self._lead = lead
        self._note = note
        self._mesh = make_engine_mesh(config)
        greet(self._mesh)
        self._path: Path = find_model(config)
        self._runner: ModelRunner | None = None  # of the model
        self._draft: ModelRunner | None = None  # of the one that drafts
        self._programs_only = False
        self._in_flight: dict[bool, deque[SampledTokens]] = {False: deque(), True: deque()}  # by is_draft

    def run(self) -> None:
        try:
            for message in self._lead.messages():
                self._obey(message)
        finally:
            for runner in (self._draft, self._runner):
                if runner is not None:
                    runner.close()

    def _obey(self, message: Message) -> None:
        match message:
            case Load():
                self._load(message)
            case Prepare():
                self._prepare(message)
            case Execute():
                self._of(message.is_draft).execute_model(schedule_of(message))
            case Sample():
                self._in_flight[message.is_draft].append(self._of(message.is_draft).sample_tokens(masks_of(message)))
            case Take():
                self._in_flight[message.is_draft].popleft().result()
            case Draft(wanted):
                self._of(is_draft=False).draft(wanted)
            case _:
                raise EngineDeadError(f"host 0 said {type(message).__name__}, which is not for a host that follows")

    def _of(self, is_draft: bool) -> ModelRunner:
        runner = self._draft if is_draft else self._runner
        assert runner is not None, "host 0 says first what to load"
        return runner

    def _load(self, message: Load) -> None:
        self._programs_only = message.programs_only
        with ExitStack() as files:
            checkpoint, head = self._open(self._path, files), open_head(self._config, files)
            runner = self._runner = self._runner or self._build(checkpoint, head, message.num_valid_tokens)
            if message.is_draft:
                checkpoint, head = self._open(find_draft(self._config), files), None
                runner = self._draft = build_draft_runner(ModelRunner, checkpoint, runner, message.num_valid_tokens)
            load_weights_or_shapes(runner, checkpoint, head, programs_only=message.programs_only)
        self._lead.send(Loaded(runner.profile_run().available))

    def _open(self, path: Path, files: ExitStack) -> Checkpoint:
        return files.enter_context(open_checkpoint(path, config_only=self._config.load_format == "dummy"))

    def _build(self, checkpoint: Checkpoint, head: HeadFiles | None, num_valid_tokens: int) -> ModelRunner:
        runner = build_runner(ModelRunner, self._config, checkpoint, self._mesh, num_valid_tokens, head)
        check_memory(runner, checkpoint)
        return runner

    def _prepare(self, message: Prepare) -> None:
        runner = self._of(message.is_draft)
        runner.initialize_kv_cache(message.num_blocks, allocate=not self._programs_only)
        runner.capture_model()
        self._lead.send(Prepared())
        if not message.is_draft:
            self._note(f"host {self._config.node_rank} follows")


@contextlib.contextmanager
def patient_signals(note: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and SIGINT reach all hosts at the same time, and host 0 may have requests to finish: it ends this one.
    A second one is obeyed."""

    def handler(number: int, frame: object) -> None:
        note("host 0 ends this host when it ends; a second signal does so now")
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)
