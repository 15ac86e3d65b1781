"""What the steps of a plan take at the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria.aot.programs import ProgramFigures
from noria.aot.roofline import Roofline, roofline
from noria.aot.topologies import Device
from noria.batch.buckets import Buckets, pick
from noria.config import ResolvedConfig
from noria.runner.work import Work, WorkModel


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a step. seconds: of its forward pass and its sampler."""

    rows: int  # requests
    context: int  # tokens of each in the cache before the step
    tokens: int  # computed in the step
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Estimator:
    """work: of one device. context: tokens in the cache of each request that decodes. Requests are shared evenly by
    the ranks, which all do the same."""

    device: Device
    config: ResolvedConfig
    buckets: Buckets
    work: WorkModel
    context: int
    programs: Sequence[ProgramFigures]

    @property
    def ranks(self) -> int:
        return self.config.num_ranks

    def of_program(self, program: ProgramFigures) -> Roofline | None:
        """Of the step that fills its bucket: where all requests can decode in it, they do; larger ones are prompts.

        None for programs whose work is not worth speaking of, and for those that do not compile.
        """
        bucket = (program.bucket or 0) // self.ranks
        if program.error is not None:
            return None
        if program.name == "forward":
            decodes = bucket <= self.buckets.requests[-1]
            return self._roofline(program, self._decode(bucket) if decodes else self._prompts(bucket))
        if program.name in ("sample", "sample shaped"):
            return self._roofline(program, self.work.sample(bucket))
        return None

    def decode(self, rows: int) -> Speed | None:
        """rows: of all ranks. None where a program that it needs does not compile."""
        own = -(-rows // self.ranks)
        return self._speed(own, self.context, own, self._decode(own))

    def prefill(self, tokens: int) -> Speed | None:
        """Of prompts that fill a step, of which the last one of each rank ends in it. tokens: of all ranks."""
        own = tokens // self.ranks
        return self._speed(1, 0, own, self._prompts(own))

    def of_prompts(self, tokens: int, sent: float) -> Roofline:
        """Of a forward pass that computes so many tokens of prompts and sends so many bytes."""
        return roofline(self.device, self._prompts(tokens), sent)

    def _speed(self, rows: int, context: int, tokens: int, work: Work) -> Speed | None:
        """rows, tokens: of a rank."""
        forward = self._find("forward", pick(self.buckets.tokens, tokens))
        sample = self._find("sample", pick(self.buckets.requests, rows))
        if forward.error is not None or sample.error is not None:
            return None
        seconds = self._roofline(forward, work).seconds + self._roofline(sample, self.work.sample(rows)).seconds
        return Speed(self.ranks * rows, context, self.ranks * tokens, seconds)

    def _find(self, name: str, bucket: int) -> ProgramFigures:
        """bucket: of a rank."""
        return next(each for each in self.programs if (each.name, each.bucket) == (name, self.ranks * bucket))

    def _decode(self, rows: int) -> Work:
        return self.work.forward([(self.context, 1)] * rows)

    def _prompts(self, tokens: int) -> Work:
        full, rest = divmod(tokens, self.config.max_model_len)
        return self.work.forward([(0, self.config.max_model_len)] * full + [(0, rest)] * (rest > 0))

    def _roofline(self, program: ProgramFigures, work: Work) -> Roofline:
        return roofline(self.device, work, program.sent)
