"""What crosses the boundary of the engine's process arrives as it was sent."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from noria.cache.paged_cache import CacheStats
from noria.config import EngineConfig, SamplingParams, StructuredOutputsParams
from noria.engine.client import options_of
from noria.engine.logprobs import Logprob
from noria.engine.messages import (
    Abort,
    Codec,
    Ended,
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
    pack_params,
    unpack_params,
)
from noria.engine.outputs import CompletionOutput
from noria.engine.request import FinishReason
from noria.observe.step_clock import StepTimes
from noria.scheduler.scheduler import SchedulerStats
from noria.spec.stats import SpeculationStats

PARAMS = SamplingParams(
    n=3,
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    seed=-(2**63),
    max_tokens=None,
    min_tokens=2,
    stop=["a", "é"],
    stop_token_ids=[5, 6],
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    presence_penalty=0.5,
    logit_bias={5: -1.5, 9: 100},
    allowed_token_ids=[5, 6, 7],
    bad_words=["x y"],
    bad_token_ids=[3],
    logprobs=0,
    prompt_logprobs=2,
)


STRUCTURED = [
    SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    for given in ({"json": {"a": [1, {"b": 2}]}}, {"choice": ["a", "b"]}, {"json_object": True}, {"regex": "a"})
]


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(), SamplingParams(seed=2**64 - 1, stop="x"), *STRUCTURED])
def test_sampling_parameters(params: SamplingParams) -> None:
    codec = Codec()
    sent = codec.encode(Submit("id", [1, 2], pack_params(params), "salt", -3))
    received = codec.decode_to_engine(sent)
    assert isinstance(received, Submit)
    assert (received.request_id, received.token_ids, received.cache_salt, received.priority) == (
        "id",
        [1, 2],
        "salt",
        -3,
    )
    assert unpack_params(received.params) == params


def test_an_engine_configuration() -> None:
    config = EngineConfig(model="m", extra_token_buckets=(24, 48), memory_utilization=0.5, seed=3)
    codec = Codec()
    received = codec.decode_to_engine(codec.encode(Start(options_of(config), 0.5)))
    assert isinstance(received, Start)
    assert EngineConfig.from_options(**received.options) == config
    assert json.loads(json.dumps(options_of(config)))["model"] == "m"  # plain values only


OUTPUT = CompletionOutput(1, "tëxt", [4, 5], FinishReason.STOP, "x")
LOGPROBS = {7: Logprob(-0.25, 1, "a"), 2**20: Logprob(-9.5, 30, None)}
CACHE = CacheStats(10, 4, 6, 3, 100, 40)


@pytest.mark.parametrize(
    "message",
    [
        Progress("loading"),
        Ready(128, 8, 20, 192, (2, 3), "fcfs", "report"),
        Parts(
            [Part("a", [OUTPUT], True, 16, 0.25), Part("b", [CompletionOutput(0, "", [1], None, None)], False, 0, None)]
        ),
        Parts(
            [Part("a", [dataclasses.replace(OUTPUT, stop_reason=7, finish_reason=FinishReason.LENGTH)], True, 0, 1.0)]
        ),
        Parts([Part("a", [dataclasses.replace(OUTPUT, logprobs=[LOGPROBS] * 2)], False, 0, 1.0, [None, LOGPROBS])]),
        Refused("a", "why"),
        Heartbeat(Stats(5, 0, SchedulerStats(1, 2, 3, CACHE), StepTimes(1.5, 0.5))),
        Heartbeat(
            Stats(5, 0, SchedulerStats(1, 2, 3, CACHE), StepTimes(1.5, 0.5), SpeculationStats(4, 9, 6, (4, 2), (4, 3)))
        ),
        Ended("ConfigError", "why"),
    ],
)
def test_from_the_engine(message: object) -> None:
    codec = Codec()
    received = codec.decode_from_engine(codec.encode(message))
    assert received == message
    assert type(received) is type(message)


@pytest.mark.parametrize("message", [Abort("a"), ResetPrefixCache(), Stop()])
def test_to_the_engine(message: object) -> None:
    codec = Codec()
    assert codec.decode_to_engine(codec.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "Abort"}),
        msgspec.msgpack.encode({"type": "Submit", "request_id": "a", "token_ids": ["x"], "params": {}}),
        msgspec.msgpack.encode({"type": "Parts", "parts": []}),  # of the other direction
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Codec().decode_to_engine(data)
