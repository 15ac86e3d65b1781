"""`noria bench`: measures this machine, and a model on it. Each kind is a small file of its own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from noria.cli.main import UsageError

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "machine": "the limits of this machine: memory bandwidth and arithmetic",
        "offline": "throughput of a model on the six workloads",
        "latency": "time to the first token and between tokens of one batch",
        "serve": "a running server, noria's or another, over HTTP",
        "step": "each compiled program alone, against the machine's limits",
        "workloads": "print the workloads, so that other engines can run the same",
    }
)


def main(args: Sequence[str]) -> int:
    kind = args[0] if args else "--help"
    if kind in ("-h", "--help", "help"):
        print(_help())
        return 0
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
        raise UsageError(f"noria bench has no {kind}; {hint}")
    return importlib.import_module(f"noria.cli.bench.{kind}").main(args[1:])


def _help() -> str:
    kinds = "\n".join(f"  {name:11}{text}" for name, text in KINDS.items())
    return (
        f"usage: noria bench KIND ...\n\nkinds:\n{kinds}\n\n"
        "noria bench KIND --help shows the options of a kind.\n\n"
        "example: noria bench offline smollm2-135m-instruct --workload single"
    )
