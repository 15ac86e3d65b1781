"""Host 0: its runner tells the others what it is about to do, and knows when one of them is gone."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import msgspec

from noria.cache.layout import BlockIds
from noria.config import EngineConfig
from noria.engine.hosts.link import (
    BEAT_S,
    GOODBYE_S,
    NOTICE_S,
    SILENCE_S,
    STUCK_S,
    Link,
    bound_the_end,
    end_process,
    frame,
)
from noria.engine.hosts.meeting import gather
from noria.engine.hosts.messages import (
    Beat,
    Draft,
    Failed,
    Load,
    Loaded,
    Message,
    Prepare,
    Prepared,
    Stop,
    Take,
    execute,
    sample,
)
from noria.engine.hosts.world import become_one
from noria.errors import EngineDeadError, NoriaError, named
from noria.runner.capture import CaptureReport
from noria.runner.memory import MemoryPlan
from noria.runner.results import SampledTokens
from noria.runner.runner import ModelRunner
from noria.scheduler.schedule import GrammarMasks, Schedule, StepResult

Answer = TypeVar("Answer")
_POLL_S = 0.1


class Hosts:
    """The other hosts. One thread may use it; the device may be used only inside `guard`."""

    def __init__(self, links: dict[int, Link]) -> None:
        self._links = links
        self._answers: dict[int, queue.SimpleQueue[Message]] = {rank: queue.SimpleQueue() for rank in links}
        self._ended = {rank: threading.Event() for rank in links}
        self._lost: NoriaError | None = None  # why the engine cannot go on
        self._noticed = threading.Event()
        self._closing = threading.Event()
        self._guarded = 0  # odd: the main thread is inside a call into the device
        for rank, link in links.items():
            threading.Thread(target=self._read, args=(rank, link), name=f"noria-host-{rank}", daemon=True).start()
        threading.Thread(target=self._beat, name="noria-host-beats", daemon=True).start()
        atexit.register(self.close)  # who forgets to close an engine does not leave the others with an error

    @classmethod
    def meet(cls, config: EngineConfig) -> Hosts:
        """Waits for the others and makes one world of all. Raises ConfigError when that does not work."""
        hosts = cls(gather(config))
        try:
            with hosts.guard():
                become_one(config)
        except BaseException as error:
            hosts.fail(error)
            raise
        return hosts

    def check(self) -> None:
        """Raises why the engine cannot go on, if it cannot."""
        if self._lost is not None:
            raise self._lost

    def tell(self, message: Message) -> None:
        """All of them. Raises EngineDeadError when one is gone."""
        self.check()
        self._tell(message)
        self.check()

    def ask(self, message: Message, kind: type[Answer], meanwhile: Callable[[], Any]) -> tuple[list[Answer], Any]:
        """Tells all of them, and calls `meanwhile`; returns their answers, by rank, and its result."""
        self.tell(message)
        with self.guard():
            own = meanwhile()
        return [self._answer(rank, kind) for rank in sorted(self._links)], own

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around calls that wait for the others. What goes wrong in one ends all hosts; when a host is gone, that is
        said to be the reason, and a call that does not end ends the process."""
        self._guarded += 1
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, NoriaError) and self._noticed.wait(2 * NOTICE_S):
                assert self._lost is not None
                raise self._lost from error
            self.fail(error)
            raise
        finally:
            self._guarded += 1
        self.check()

    def fail(self, error: BaseException) -> None:
        """This host ends with an error: the others are told why, and do the same."""
        if not self._closing.is_set():
            self._closing.set()
            is_ours = isinstance(error, NoriaError)
            reason = str(error) if is_ours else f"host 0 has ended: {type(error).__name__}: {error}".rstrip(": ")
            self._tell(Failed(type(error).__name__ if is_ours else EngineDeadError.__name__, reason))
            self._hang_up()

    def close(self) -> None:
        """Ends the others, and waits a while until they have."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._tell(Stop())
        deadline = time.monotonic() + GOODBYE_S
        for ended in self._ended.values():
            ended.wait(max(0.0, deadline - time.monotonic()))
        self._hang_up()
        if self._lost is None:
            jax.distributed.shutdown()

    def _hang_up(self) -> None:
        for link in self._links.values():
            link.close()

    def _answer(self, rank: int, kind: type[Answer]) -> Answer:
        while True:
            self.check()
            with contextlib.suppress(queue.Empty):
                answer = self._answers[rank].get(timeout=_POLL_S)
                if isinstance(answer, kind):
                    return answer
                self._lose(EngineDeadError(f"host {rank} said {type(answer).__name__} instead of {kind.__name__}"))

    def _tell(self, message: Message) -> None:
        data = frame(message)
        for rank, link in self._links.items():
            try:
                link.send_frame(data)
            except OSError as error:
                if not self._closing.is_set():
                    self._lose(EngineDeadError(f"host {rank} is gone: {error.strerror or error}"))

    def _read(self, rank: int, link: Link) -> None:
        try:
            for message in link.messages():
                if isinstance(message, Failed):
                    self._lose(named(message.kind, f"host {rank}: {message.reason}"))
                elif not isinstance(message, Beat):
                    self._answers[rank].put(message)
            reason = "it has ended"
        except TimeoutError:
            reason = f"it has been silent for {SILENCE_S:g} s"
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        self._ended[rank].set()
        if not self._closing.is_set():
            self._lose(EngineDeadError(f"host {rank} is gone: {reason}"))

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            for link in self._links.values():
                with contextlib.suppress(OSError):  # the thread that reads will see
                    link.beat()

    def _lose(self, error: NoriaError) -> None:
        """By any thread; the first one counts."""
        if self._noticed.is_set() or self._closing.is_set():
            return
        self._lost = error
        self._noticed.set()
        bound_the_end(error)
        data = frame(Failed(type(error).__name__, str(error)))
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send_frame(data)
        threading.Thread(target=self._end_if_stuck, args=(error,), name="noria-host-end", daemon=True).start()

    def _end_if_stuck(self, error: NoriaError) -> None:
        guarded = self._guarded
        while not self._closing.wait(STUCK_S):
            if guarded % 2 and guarded == self._guarded:
                end_process(error)
            guarded = self._guarded


class LeadRunner(ModelRunner):
    """A ModelRunner whose calls are told to the other hosts before they are carried out here.

    `load` and `prepare` are for its start, in place of load_model, initialize_kv_cache and capture_model.
    """

    def __init__(self, hosts: Hosts, *arguments: Any, is_draft: bool = False) -> None:
        """is_draft: of the model that drafts; the hosts end with the other one."""
        super().__init__(*arguments)
        self.hosts = hosts
        self._is_draft = is_draft

    def load(self, here: Callable[[], None], *, programs_only: bool) -> MemoryPlan:
        """All hosts load at the same time. here: what this one does. Returns the plan that fits every host."""
        told, _ = self.hosts.ask(Load(self._num_valid_tokens, programs_only, self._is_draft), Loaded, here)
        plan = self.profile_run()
        least = min([plan.available, *(other.available for other in told)])
        return plan if least == plan.available else self.profile_run(least)

    def prepare(self, num_blocks: int, here: Callable[[], CaptureReport]) -> CaptureReport:
        """The same for cache and programs."""
        _, report = self.hosts.ask(Prepare(num_blocks, self._is_draft), Prepared, here)
        return report

    def execute_model(self, schedule: Schedule) -> tuple[str, ...]:
        self.hosts.tell(execute(schedule, is_draft=self._is_draft))
        with self.hosts.guard():
            return super().execute_model(schedule)

    def sample_tokens(self, masks: GrammarMasks | None = None) -> SampledTokens:
        self.hosts.tell(sample(masks, is_draft=self._is_draft))
        with self.hosts.guard():
            sampled = super().sample_tokens(masks)
        fields = {field.name: getattr(sampled, field.name) for field in dataclasses.fields(sampled)}
        return SharedTokens(**fields, hosts=self.hosts, is_draft=self._is_draft)

    def draft(self, wanted: dict[str, tuple[int, BlockIds]]) -> dict[str, list[int]]:
        self.hosts.tell(Draft(wanted))
        with self.hosts.guard():
            return super().draft(wanted)

    def close(self) -> None:
        super().close()
        if not self._is_draft:
            self.hosts.close()


@dataclass(frozen=True, slots=True)
class SharedTokens(SampledTokens):
    """Tokens that the other hosts take at the same point of the order of things, so that they know them, too."""

    hosts: Hosts | None = None
    is_draft: bool = False

    def result(self) -> StepResult:
        assert self.hosts is not None
        self.hosts.tell(Take(self.is_draft))
        with self.hosts.guard():
            return super(SharedTokens, self).result()
