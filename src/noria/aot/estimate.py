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
    """Of a step. seconds: of its forward passes and its sampler."""

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
    the ranks, which all do the same; what is not attention a device does for all ranks of its copy of the model."""

    device: Device
    config: ResolvedConfig
    buckets: Buckets
    work: WorkModel
    context: int
    programs: Sequence[ProgramFigures]
    long_rows: int = 0  # of a pass with requests that exceed most_model_len

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
        if program.name in ("sample", "sample shaped"):
            return self._roofline(program, self._sample(bucket))
        if program.name == "forward":
            rows, longest, context = self.buckets.requests[-1], self._usual, min(self.context, self._usual - 1)
        elif program.name == "forward long":
            rows, longest, context = self.long_rows, self.config.max_model_len, max(self.context, self._usual)
        else:
            return None
        return self._roofline(
            program, self._decode(bucket, context) if bucket <= rows else self._prompts(bucket, longest)
        )

    @property
    def _usual(self) -> int:
        """Most tokens of a request in the program called forward."""
        return self.config.most_model_len or self.config.max_model_len

    def decode(self, rows: int) -> Speed | None:
        """rows: of all ranks. None where a program that it needs does not compile."""
        own = -(-rows // self.ranks)
        most, name = (own, "forward") if self.context < self._usual else (self.long_rows, "forward long")
        counts = [min(most, own - first) for first in range(0, own, most)]
        return self._speed(own, self.context, own, [(name, n, self._decode(n, self.context)) for n in counts])

    def prefill(self, tokens: int) -> Speed | None:
        """Of prompts that fill a step, of which the last one of each rank ends in it, of most_model_len tokens, if that
        is given, or of max_model_len. tokens: of all ranks."""
        own = min(tokens // self.ranks, self.buckets.requests[-1] * self._usual)
        return self._speed(1, 0, own, [("forward", own, self._prompts(own, self._usual))])

    def of_prompts(self, tokens: int, sent: float) -> Roofline:
        """Of a forward pass in which each rank computes so many tokens of prompts, and a device sends so many bytes."""
        return roofline(self.device, self._prompts(tokens, self._usual), sent)

    def _speed(self, rows: int, context: int, tokens: int, passes: Sequence[tuple[str, int, Work]]) -> Speed | None:
        """rows, tokens: of a rank. passes: program, tokens and work of each forward pass of the step."""
        works = [(self._find(name, pick(self.buckets.tokens, count)), work) for name, count, work in passes]
        works.append((self._find("sample", pick(self.buckets.requests, rows)), self._sample(rows)))
        if any(program.error is not None for program, _ in works):
            return None
        seconds = sum(self._roofline(program, work).seconds for program, work in works)
        return Speed(self.ranks * rows, context, self.ranks * tokens, seconds)

    def _find(self, name: str, bucket: int) -> ProgramFigures:
        """bucket: of a rank."""
        return next(each for each in self.programs if (each.name, each.bucket) == (name, self.ranks * bucket))

    @property
    def _in_copy(self) -> int:
        """Ranks of a copy of the model."""
        return self.config.attention_data_parallel_size

    def _decode(self, rows: int, context: int) -> Work:
        """rows: of a rank, as everything below."""
        return self.work.forward([(context, 1)] * rows * self._in_copy)

    def _prompts(self, tokens: int, longest: int) -> Work:
        full, rest = divmod(tokens, longest)
        return self.work.forward(([(0, longest)] * full + [(0, rest)] * (rest > 0)) * self._in_copy)

    def _sample(self, rows: int) -> Work:
        return self.work.sample(rows * self._in_copy)

    def _roofline(self, program: ProgramFigures, work: Work) -> Roofline:
        return roofline(self.device, work, program.sent)
