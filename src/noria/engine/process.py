"""The engine's own process: messages come in, the wheel turns, the news of every step go out.

`python -m noria.engine.process ADDRESS` connects to a socket of its parent's and ends with it. Everything happens in
one thread: what the loop sends is the proof that it turns.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import zmq

from noria.config import EngineConfig
from noria.engine.front import EngineFront
from noria.engine.llm import EngineStats
from noria.engine.messages import (
    Abort,
    Codec,
    Ended,
    FromEngine,
    Heartbeat,
    Part,
    Parts,
    Progress,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stats,
    Stop,
    Submit,
    ToEngine,
    unpack_params,
)
from noria.engine.outputs import RequestOutput
from noria.engine.startup import Engine, start
from noria.errors import EngineDeadError, NoriaError

_log = logging.getLogger(__name__)
_LINGER_MS = 2000  # for the last words, when the process ends


class Link(Protocol):
    """The engine's end of the connection."""

    def receive(self, wait_s: float) -> Iterator[ToEngine]:
        """All messages that are there; waits up to so many seconds for the first."""
        ...

    def send(self, message: FromEngine) -> None: ...


class SocketLink:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._codec = Codec()

    def receive(self, wait_s: float) -> Iterator[ToEngine]:
        wait_ms = int(wait_s * 1000)
        while self._socket.poll(wait_ms):
            yield self._codec.decode_to_engine(self._socket.recv())
            wait_ms = 0

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._codec.encode(message))


class EngineLoop:
    """One engine and its link, turning until it is told to stop."""

    def __init__(self, engine: Engine, link: Link, heartbeat_s: float) -> None:
        self._engine = engine
        self._front = EngineFront(engine)
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._last_beat = 0.0

    def run(self) -> None:
        """Raises whatever a step raises: it is the engine's last one."""
        self._beat(at_once=True)
        while self.turn():
            pass

    def turn(self) -> bool:
        """Carries out what came in and runs a step if there is work. False when told to stop."""
        wait_s = 0.0 if self._front.has_unfinished else self._heartbeat_s
        for message in self._link.receive(wait_s):
            if isinstance(message, Stop):
                return False
            self._obey(message)
        if self._front.has_unfinished:
            if parts := [_part(output) for output in self._front.step()]:
                self._link.send(Parts(parts))
            self._beat(at_once=not self._front.has_unfinished)
        else:
            self._engine.check_hosts()
            self._beat(at_once=True)
        return True

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                if (output := self._front.abort(request_id)) is not None:
                    self._link.send(Parts([_part(output)]))
            case ResetPrefixCache():
                self._engine.core.reset_prefix_cache()
            case _:
                raise EngineDeadError(f"a running engine was sent a {type(message).__name__}")

    def _submit(self, message: Submit) -> None:
        try:
            self._front.add(
                message.request_id,
                message.token_ids,
                unpack_params(message.params),
                cache_salt=message.cache_salt,
                priority=message.priority,
            )
        except EngineDeadError:
            raise
        except Exception as error:  # whatever it is, it is this request's own
            if not isinstance(error, NoriaError):
                _log.exception("request %s could not be admitted", message.request_id)
            self._link.send(Refused(message.request_id, str(error) or type(error).__name__))

    def _beat(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self._last_beat >= self._heartbeat_s:
            self._last_beat = now
            stats = EngineStats.of(self._engine)
            figures = (stats.steps, stats.compiles_after_warmup, stats.scheduler, stats.times, stats.speculation)
            self._link.send(Heartbeat(Stats(*figures)))


def _part(output: RequestOutput) -> Part:
    metrics = output.metrics
    queue_s = None if metrics.scheduled_time is None else metrics.scheduled_time - metrics.arrival_time
    return Part(
        output.request_id,
        output.outputs,
        output.finished,
        output.num_cached_tokens,
        queue_s,
        output.prompt_logprobs,
    )


def ready_message(engine: Engine) -> Ready:
    return Ready(
        max_model_len=engine.config.max_model_len,
        max_num_seqs=engine.config.max_num_seqs,
        max_logprobs=engine.config.max_logprobs,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        scheduling_policy=engine.config.scheduling_policy,
        report=str(engine.report),
    )


def serve(link: Link, order: Start) -> bool:
    """Starts an engine and turns it until it is stopped. Reports how it ended; False when with an error."""

    @contextmanager
    def progress(stage: str) -> Iterator[Callable[[int, int], None]]:
        link.send(Progress(stage))
        yield lambda done, total: None

    try:
        engine = start(EngineConfig.from_options(**order.options), progress)
        engine.core.structured.compiler.warm_up()  # before anybody runs whom it would hold up
        try:
            link.send(ready_message(engine))
            EngineLoop(engine, link, order.heartbeat_s).run()
        finally:
            engine.core.close()
    except NoriaError as error:
        link.send(Ended(type(error).__name__, str(error)))
        return False
    except Exception as error:
        _log.exception("the engine died")
        link.send(Ended(EngineDeadError.__name__, f"the engine has ended: {type(error).__name__}: {error}"))
        return False
    link.send(Ended(EngineDeadError.__name__, "the engine has ended: it was closed"))
    return True


def main(args: Sequence[str]) -> int:
    [address] = args
    logging.basicConfig(format="%(asctime)s engine %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    # Ctrl-C in a terminal and a service's SIGTERM reach every process at once; when to end is the parent's decision.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="noria-parent-watch", daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)  # a send never waits: what is on its way is bounded by what was asked for
        socket.linger = _LINGER_MS
        socket.connect(address)
        link = SocketLink(socket)
        order = next(iter(link.receive(60.0)), None)
        if not isinstance(order, Start):
            return 2
        return 0 if serve(link, order) else 1


def _end_with_parent() -> None:
    """stdin is a pipe that nobody writes to: its end is the parent's end, however that came."""
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
