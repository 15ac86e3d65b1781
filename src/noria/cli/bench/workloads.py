"""The six workloads, and `noria bench workloads`, which prints them for other engines.

Prompts are random token ids, the same on every machine; greedy, and nothing stops at the end-of-sequence token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noria.bench.prompts import HIGH, LOW
from noria.cli import options
from noria.errors import ConfigError

Choice = Literal["prefill", "single", "batch16", "batch64", "mixed64", "shared32", "all"]
_TEXT = "Prints the workloads as JSON: for each name a list of requests, each the prompt's token ids and output tokens."


@dataclass(frozen=True)
class Workload:
    """requests: the token ids of a prompt and the number of tokens to generate."""

    name: str
    requests: tuple[tuple[list[int], int], ...]

    @property
    def input_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(len(prompt) + count for prompt, count in self.requests)

    def fold(self, vocab_size: int) -> Workload:
        """The same for a model with a smaller vocabulary: ids beyond it begin again at 0."""
        if vocab_size >= HIGH:
            return self
        return Workload(self.name, tuple(([token % vocab_size for token in ids], n) for ids, n in self.requests))

    def check(self, max_model_len: int) -> None:
        """Raises ConfigError when a request does not fit."""
        if self.longest > max_model_len:
            raise ConfigError(
                f"workload {self.name} has requests of {self.longest} tokens, but max_model_len is {max_model_len}; "
                "raise it, or choose another --workload"
            )


def make(seed: int = 0) -> tuple[Workload, ...]:
    """All workloads. The order of the draws is part of their definition."""
    source = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [source.randrange(LOW, HIGH) for _ in range(count)]

    shared = ids(512)
    return (
        Workload("prefill", ((ids(512), 1),)),
        Workload("single", ((ids(8), 65),)),
        Workload("batch16", tuple((ids(128), 64) for _ in range(16))),
        Workload("batch64", tuple((ids(128), 64) for _ in range(64))),
        Workload("mixed64", tuple((ids(source.randint(16, 256)), source.randint(16, 256)) for _ in range(64))),
        Workload("shared32", tuple((shared + ids(32), 32) for _ in range(32))),
    )


def choice() -> options.Field:
    return options.repeated("workload", Choice, "run only this one; may be repeated")


def chosen(names: Sequence[Choice]) -> tuple[Workload, ...]:
    """In their own order; no name stands for all."""
    return tuple(each for each in make() if not names or "all" in names or each.name in names)


def main(args: Sequence[str]) -> int:
    values = options.parse("bench workloads", _TEXT, args, [choice()])
    print(json.dumps({workload.name: workload.requests for workload in chosen(values.workload)}))
    return 0
