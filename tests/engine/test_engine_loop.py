"""The loop of the engine's process, with a real engine and without a process: what comes in, what goes out, when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from noria import LLM, SamplingParams
from noria.config import EngineConfig
from noria.engine.client import options_of
from noria.engine.messages import (
    Abort,
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
    Stop,
    Submit,
    ToEngine,
    pack_params,
)
from noria.engine.process import EngineLoop, ready_message, serve
from noria.engine.startup import Engine, start
from noria.runner.runner import ModelRunner

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = [5, 6, 7]


class Link:
    def __init__(self, *inbox: ToEngine) -> None:
        self.inbox: deque[ToEngine] = deque(inbox)
        self.sent: list[FromEngine] = []

    def receive(self, wait_s: float) -> Iterator[ToEngine]:
        while self.inbox:
            yield self.inbox.popleft()

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def parts_of(self, request_id: str) -> list[Part]:
        news = (part for message in self.sent if isinstance(message, Parts) for part in message.parts)
        return [part for part in news if part.request_id == request_id]

    def ids_of(self, request_id: str) -> list[int]:
        return [i for part in self.parts_of(request_id) for output in part.outputs for i in output.token_ids]


def submit(request_id: str, prompt: list[int] = PROMPT, params: SamplingParams = LONG) -> Submit:
    return Submit(request_id, prompt, pack_params(params))


@pytest.fixture(scope="module")
def engine(options: dict) -> Iterator[Engine]:
    engine = start(EngineConfig(**options))
    yield engine
    engine.core.close()


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def loop(engine: Engine, link: Link) -> Iterator[EngineLoop]:
    yield EngineLoop(engine, link, 0.01)
    engine.core.scheduler.check_integrity()
    assert not engine.core.scheduler.has_unfinished
    assert engine.core.scheduler.stats.cache.num_used == 0


def turn_until_idle(loop: EngineLoop, engine: Engine) -> None:
    loop.turn()
    while engine.core.scheduler.has_unfinished:
        loop.turn()


def test_answers_equal_those_of_the_offline_front(loop: EngineLoop, engine: Engine, link: Link, llm: LLM) -> None:
    prompts = [[5 + index, 6, 7, 50 - index] for index in range(12)]  # more than there are seats
    link.inbox.extend(submit(str(index), prompt) for index, prompt in enumerate(prompts))
    turn_until_idle(loop, engine)
    for index, answer in enumerate(llm.generate(prompts, LONG)):
        parts = link.parts_of(str(index))
        assert link.ids_of(str(index)) == answer.outputs[0].token_ids
        assert "".join(part.outputs[0].text for part in parts) == answer.outputs[0].text
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.queue_s is not None and part.queue_s >= 0 for part in parts)
    queued = [link.parts_of(str(index))[0].queue_s for index in range(12)]
    assert max(queued[:4]) < min(queued[8:])  # type: ignore[type-var]  # those that had to wait say so


def test_what_is_aborted_is_gone_within_two_steps(loop: EngineLoop, engine: Engine, link: Link) -> None:
    """One at its fifth token, the others running or waiting."""
    names = [str(index) for index in range(12)]
    link.inbox.extend(submit(name, [5 + int(name), 6, 7]) for name in names)
    while len(link.ids_of("0")) < 5:
        loop.turn()
    assert engine.core.scheduler.stats.num_waiting == 4
    before = engine.core.num_steps
    link.inbox.extend(Abort(name) for name in names)
    loop.turn()
    loop.turn()
    stats = engine.core.scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.cache.num_used) == (0, 0, 0)
    assert engine.core.num_steps - before <= 2
    for name in names:
        last = link.parts_of(name)[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
    loop.turn()
    assert isinstance(link.sent[-1], Heartbeat)


def test_a_bad_request_is_refused_alone(loop: EngineLoop, engine: Engine, link: Link) -> None:
    bad = [submit("bad", [192]), submit("long", [5] * 100), Submit("odd", PROMPT, {"no_such_parameter": 1})]
    link.inbox.extend([submit("good"), *bad, submit("good"), Abort("never there")])
    turn_until_idle(loop, engine)
    refused = {message.request_id: message.reason for message in link.sent if isinstance(message, Refused)}
    assert set(refused) == {"bad", "long", "odd", "good"}  # the second of that name
    assert "192, which is no token id" in refused["bad"]
    assert "in use" in refused["good"]
    assert len(link.ids_of("good")) == 60


def test_it_beats_while_it_rests_and_while_it_works(loop: EngineLoop, engine: Engine, link: Link) -> None:
    for _ in range(3):
        loop.turn()
    assert len(link.sent) == 3
    link.inbox.append(submit("a", params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    turn_until_idle(loop, engine)
    beats = [message.stats for message in link.sent if isinstance(message, Heartbeat)]
    assert beats[-1].steps == engine.core.num_steps
    assert beats[-1].scheduler.num_running == 0
    assert beats[-1].compiles_after_warmup == 0
    assert beats[-1].times.wall_s > 0


def test_the_prefix_cache_may_be_reset(loop: EngineLoop, engine: Engine, link: Link) -> None:
    prompt, one = [5 + index for index in range(30)], SamplingParams(temperature=0, max_tokens=1)
    for name, before in (("a", [ResetPrefixCache()]), ("b", []), ("c", [ResetPrefixCache()])):
        link.inbox.extend([*before, submit(name, prompt, one)])
        turn_until_idle(loop, engine)
    assert [link.parts_of(name)[-1].num_cached_tokens for name in "abc"] == [0, 24, 0]


def test_the_life_of_an_engine_in_messages(options: dict) -> None:
    link = Link(submit("a", params=SamplingParams(max_tokens=1)), Stop())
    assert serve(link, Start(options_of(EngineConfig(**options)), 0.01))
    kinds = [type(message) for message in link.sent]
    assert kinds == [Progress, Progress, Ready, Heartbeat, Ended]  # Stop came before the first step
    [ready] = [message for message in link.sent if isinstance(message, Ready)]
    assert (ready.max_model_len, ready.max_num_seqs, ready.vocab_size, ready.eos_token_ids) == (64, 8, 192, (2,))
    assert "programs ready" in ready.report


def test_options_that_cannot_work(options: dict) -> None:
    link = Link()
    assert not serve(link, Start({**options, "max_model_len": 1000}, 0.01))
    [ended] = link.sent
    assert isinstance(ended, Ended)
    assert ended.kind == "ConfigError"
    assert "max_model_len (1000) exceeds" in ended.reason


def test_a_step_that_fails_is_the_last(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    link = Link(submit("a"))
    monkeypatch.setattr(ModelRunner, "execute_model", fail)
    assert not serve(link, Start(options_of(EngineConfig(**options)), 0.01))
    assert link.sent[-1] == Ended("EngineDeadError", "the engine has ended: RuntimeError: the device is gone")


def test_what_the_front_is_told_is_what_the_engine_is(engine: Engine) -> None:
    assert ready_message(engine).scheduling_policy == engine.config.scheduling_policy
