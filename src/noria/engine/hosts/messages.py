"""What hosts say to each other: typed messages in MessagePack, never pickle.

Host 0 plans, and tells the others in the order in which it calls its own runners; everything else they know themselves.
There is one for the model and, where a second model drafts, one for that: `is_draft` says which is meant.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from noria.cache.layout import BlockIds
from noria.engine.messages import pack_params, unpack_params
from noria.scheduler.schedule import GrammarMasks, NewRequest, Schedule


def _struct(name: str, source: type, **changed: Any) -> Any:
    """A type for the wire with the fields of a dataclass, some of them of other types. Whatever the dataclass gets in
    the future travels with it."""
    hints = typing.get_type_hints(source)
    fields = [(field.name, changed.get(field.name, hints[field.name])) for field in dataclasses.fields(source)]
    return msgspec.defstruct(name, fields, array_like=True, frozen=True)


WireRequest: Any = _struct("WireRequest", NewRequest, sampling_params=dict[str, Any])
WireSchedule: Any = _struct("WireSchedule", Schedule, new_requests=tuple[WireRequest, ...])


# ------------------------------------------------------------------------------------------------------ from both


class Beat(msgspec.Struct, tag=True, frozen=True):
    """I am here."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last message of a host that ends with an error. kind: the name of a class in errors.py."""

    kind: str
    reason: str


# ---------------------------------------------------------------------------------------------------- to host 0


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message. versions: of what must be the same everywhere. options: fields of EngineConfig."""

    rank: int
    versions: dict[str, str]
    options: dict[str, Any]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The weights are here. available: bytes that a device has for the engine, see MemoryPlan."""

    available: int


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Every program is compiled."""


# -------------------------------------------------------------------------------------------------- from host 0


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All hosts are there."""


class Load(msgspec.Struct, tag=True, frozen=True):
    """Make a runner. programs_only: without weights and cache."""

    num_valid_tokens: int  # as ModelRunner wants it
    programs_only: bool
    is_draft: bool


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make the cache, and compile."""

    num_blocks: int
    is_draft: bool


class Execute(msgspec.Struct, tag=True, frozen=True):
    schedule: WireSchedule  # pyright: ignore[reportInvalidTypeForm]
    is_draft: bool = False


class Sample(msgspec.Struct, tag=True, frozen=True):
    request_ids: tuple[str, ...] = ()  # as in GrammarMasks, for sample_tokens; () for none
    bitmask: bytes = b""
    is_draft: bool = False


class Take(msgspec.Struct, tag=True, frozen=True):
    """Wait for the result of the oldest step of which that was not done."""

    is_draft: bool = False


class Draft(msgspec.Struct, tag=True, frozen=True):
    """Let the model's head make drafts."""

    wanted: dict[str, tuple[int, BlockIds]]  # as ModelRunner.draft wants it


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End now: nothing is wrong."""


Message = (
    Beat | Failed | Hello | Loaded | Prepared | Welcome | Load | Prepare | Execute | Sample | Take | Draft | Stop
)  # fmt: skip


def execute(schedule: Schedule, *, is_draft: bool = False) -> Execute:
    new = tuple(WireRequest(**_fields(new, sampling_params=pack_params(new.sampling_params)))
                for new in schedule.new_requests)  # fmt: skip
    return Execute(WireSchedule(**_fields(schedule, new_requests=new)), is_draft)


def schedule_of(message: Execute) -> Schedule:
    wire = msgspec.structs.asdict(message.schedule)
    return Schedule(**{**wire, "new_requests": tuple(map(_request_of, wire["new_requests"]))})


def _request_of(wire: Any) -> NewRequest:
    fields = msgspec.structs.asdict(wire)
    return NewRequest(**{**fields, "sampling_params": unpack_params(fields["sampling_params"])})


def sample(masks: GrammarMasks | None, *, is_draft: bool = False) -> Sample:
    if masks is None:
        return Sample(is_draft=is_draft)
    return Sample(masks.request_ids, masks.bitmask.tobytes(), is_draft)


def masks_of(message: Sample) -> GrammarMasks | None:
    if not message.bitmask:
        return None
    words = np.frombuffer(message.bitmask, np.int32)
    return GrammarMasks(message.request_ids, words.reshape(len(message.request_ids), -1))


def _fields(source: Any, **changed: Any) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)} | changed


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decoder() -> Callable[[bytes], Message]:
    """Of one thread. It raises msgspec.MsgspecError for what is no message."""
    return msgspec.msgpack.Decoder(Message).decode
