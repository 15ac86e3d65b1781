"""What a server and its engine process say to each other: typed messages in MessagePack, never pickle.

A peer that sends anything else is refused by the decoder; no message can name code to run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from noria.config import SamplingParams, StructuredOutputsParams
from noria.engine.outputs import CompletionOutput, TokenLogprobs
from noria.observe.step_clock import StepTimes
from noria.scheduler.scheduler import SchedulerStats
from noria.spec.stats import SpeculationStats

# ------------------------------------------------------------------------------------------------ to the engine


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: start an engine with these fields of EngineConfig."""

    options: dict[str, Any]
    heartbeat_s: float  # the longest silence of a loop that turns


class Submit(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    token_ids: list[int]
    params: dict[str, Any]  # see pack_params
    cache_salt: str | None = None
    priority: int = 0


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    pass


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End now; whatever runs is dropped."""


ToEngine = Start | Submit | Abort | ResetPrefixCache | Stop

# ---------------------------------------------------------------------------------------------- from the engine


class Progress(msgspec.Struct, tag=True, frozen=True):
    """A stage of the start has begun."""

    stage: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves; what its front must know to refuse a request before it is sent."""

    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    scheduling_policy: str
    report: str  # of the start, for people


class Part(msgspec.Struct, frozen=True):
    """What a step added to the answer of one request: a RequestOutput without what its front knows already."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    queue_s: float | None  # seconds until the first step that computed it; None before its first token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # as in RequestOutput


class Parts(msgspec.Struct, tag=True, frozen=True):
    """The news of one step."""

    parts: list[Part]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The request was not admitted."""

    request_id: str
    reason: str


class Stats(msgspec.Struct, frozen=True):
    """Sums since the engine's start and its state now; the attributes are those of EngineStats."""

    steps: int
    compiles_after_warmup: int
    scheduler: SchedulerStats
    times: StepTimes
    speculation: SpeculationStats = SpeculationStats()


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The loop turns."""

    stats: Stats


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The last message. kind: the name of a class in errors.py."""

    kind: str
    reason: str


FromEngine = Progress | Ready | Parts | Refused | Heartbeat | Ended


class Codec:
    """Messages to bytes and back. One of these is not for several threads at a time.

    Decoding raises msgspec.DecodeError or msgspec.ValidationError for what is no such message.
    """

    def __init__(self) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
        self.decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


_DEFAULTS = SamplingParams()


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(_DEFAULTS, name)}


def unpack_params(fields: dict[str, Any]) -> SamplingParams:
    fields = {name: _frozen(value) for name, value in fields.items()}
    if (structured := fields.get("structured_outputs")) is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**fields)


def _frozen(value: Any) -> Any:
    """SamplingParams hold tuples; MessagePack knows one kind of list."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
