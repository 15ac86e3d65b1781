"""Many streaming clients at once, a third of which leave in the middle: nothing may be lost, mixed up or left behind.

Run: python benchmarks/many_clients.py --model MODEL [--clients 200] [--requests 2000]

Every prompt is first answered alone, greedily and in float32, where noria's tokens do not depend on what else is in the
batch: so every stream can be compared with that answer, letter by letter. Clients that leave do so after some parts of
the answer or after some time, before the first part too. In the end the server must be as it was: nothing runs or
waits, all blocks of the cache are free, no program was compiled, and its memory has stopped to grow. The figures are
appended to benchmarks/results/ as a JSON line; the exit status is 1 when one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import HERE, noria, slug
from servers import Server, free_port

from noria.bench.client import COMPLETIONS, LoadClient
from noria.bench.figures import percentile
from noria.bench.prompts import as_text, random_ids
from noria.bench.records import Question, Record
from noria.cli.bench.machine import limits, versions

PHASES = 4  # after each of which the memory is looked at
MEMORY_SHARE, MEMORY_MIB = 0.02, 8.0  # more than the larger of the two between the first phase and the last is growth
IDLE_S = 20.0  # in which a server must be idle when nobody asks any more
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Findings:
    """whole: answers to their end; left: clients that left. lost: requests that failed; mixed_up: whose text is not
    that of their prompt. first_s: to the first part, of whole answers."""

    whole: int = 0
    left: int = 0
    left_by_clock: int = 0
    lost: list[str] = field(default_factory=list)
    mixed_up: list[str] = field(default_factory=list)
    output_tokens: int = 0
    first_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One client's request. parts, seconds: when it leaves; None for never."""

    question: int
    parts: int | None = None
    seconds: float | None = None


def main() -> None:
    args = arguments()
    machine = dataclasses.asdict(limits())
    output = args.output or HERE / "results" / f"{datetime.date.today()}-{slug(machine)}-many-clients.jsonl"
    port = free_port()
    command = [*noria(), "serve", str(args.model), "--served-model-name=model", f"--port={port}", "--dtype=float32"]
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(
            [*command, "--strict-compile", *args.noria_option],
            f"http://127.0.0.1:{port}",
            "/ready",
            Path(scratch) / "log",
            environment=dict(os.environ),
        )
        with server:
            figures = asyncio.run(measure(args, server))
            if "Traceback" in server.tail():
                figures["faults"].append("the server's log has a traceback")
                print(server.tail(), file=sys.stderr)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    line = {"date": date, "model": args.name or args.model.stem, "workload": "many-clients", **figures}
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "machine": machine, "versions": versions()}) + "\n")
    print(json.dumps(figures, indent=1))
    print(output)
    if figures["faults"]:
        raise SystemExit("; ".join(figures["faults"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="whatever noria serve takes")
    parser.add_argument("--name", help="of the model in the results; by default the name of the file")
    parser.add_argument("--clients", type=int, default=200, help="at a time")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--leaving", type=float, default=1 / 3, help="the share of clients that leave, 0 to 1")
    parser.add_argument("--prompts", type=int, default=64, help="different ones")
    parser.add_argument("--input-len", type=int, default=48, help="words of the longest prompt")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noria-option", action="append", default=[], help="for noria: --noria-option=--block-size=32")
    parser.add_argument("--output", type=Path, help="file to append to")
    args = parser.parse_args()
    for name in ("clients", "requests", "prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.leaving <= 1:
        parser.error("--leaving must be 0 to 1")
    return args


async def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    source = random.Random(args.seed)
    questions = [
        Question(as_text(random_ids(source.randint(1, args.input_len), source)), source.randint(1, args.output_len))
        for _ in range(args.prompts)
    ]
    extra = {"temperature": 0, "ignore_eos": True}
    async with LoadClient(server.url, COMPLETIONS, "model", extra=extra, keep_text=True) as client:
        blocks = await metric(client, "kv_cache_blocks_free")
        alone = [await client.ask(question) for question in questions]
        if failed := [record for record in alone if record.error]:
            raise SystemExit(f"a prompt alone failed ({failed[0].error}): {failed[0].detail}\n{server.tail()}")
        jobs = make_jobs(args, alone, source)
        findings, memory = Findings(), [server.rss_mib()]
        idle_s, busy_s = 0.0, 0.0
        for phase in range(PHASES):
            begin = time.perf_counter()
            await ask_all(client, questions, alone, jobs[phase::PHASES], args.clients, findings)
            busy_s += time.perf_counter() - begin
            idle_s = max(idle_s, await until_idle(client))
            memory.append(server.rss_mib())
        after = {name: await metric(client, name) for name in (*BUSY, "kv_cache_blocks_free", "num_preemptions_total")}
        compiles = await metric(client, "compiles_after_warmup_total")
    figures = {
        **{name: getattr(args, name) for name in ("clients", "requests", "prompts", "input_len", "output_len")},
        "whole": findings.whole,
        "left": findings.left,
        "left_by_clock": findings.left_by_clock,
        "lost": len(findings.lost),
        "mixed_up": len(findings.mixed_up),
        "compiles_after_warmup": compiles,
        "seconds": round(busy_s, 2),
        "requests_s": round(len(jobs) / busy_s, 2),
        "output_tokens_s_of_whole": round(findings.output_tokens / busy_s, 1),
        "ttft_ms": {f"p{each}": milliseconds(findings.first_s, each) for each in (50, 90, 99)},
        "seconds_until_idle": round(idle_s, 2),
        "rss_mib": memory,
        "blocks_free_before": blocks,
        "after": after,
    }
    return {**figures, "faults": faults(findings, len(jobs), blocks, after, compiles, memory)}


def make_jobs(args: argparse.Namespace, alone: Sequence[Record], source: random.Random) -> list[Job]:
    """Half of those that leave do so after some parts of the answer, half after a time in which the prompt alone would
    have been answered, which in a crowd is before the first part or soon after it."""
    leaving = set(source.sample(range(args.requests), round(args.requests * args.leaving)))
    jobs = list[Job]()
    for index in range(args.requests):
        question = source.randrange(len(alone))
        if index not in leaving:
            jobs.append(Job(question))
        elif source.random() < 0.5:
            jobs.append(Job(question, parts=source.randint(1, max(1, len(alone[question].news) - 1))))
        else:
            jobs.append(Job(question, seconds=source.uniform(0, alone[question].e2el)))
    return jobs


async def ask_all(
    client: LoadClient,
    questions: Sequence[Question],
    alone: Sequence[Record],
    jobs: Sequence[Job],
    clients: int,
    findings: Findings,
) -> None:
    left = iter(jobs)

    async def one() -> None:
        for job in left:  # shared: each client takes the next
            record = await ask(client, questions[job.question], job)
            note(job, record, alone[job.question], findings)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())


async def ask(client: LoadClient, question: Question, job: Job) -> Record | None:
    """None for a client that left by the clock."""
    if job.seconds is None:
        return await client.ask(question, leave_after=job.parts)
    asking = asyncio.ensure_future(client.ask(question))
    done, _ = await asyncio.wait({asking}, timeout=job.seconds)
    if done:
        return asking.result()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return None


def note(job: Job, record: Record | None, expected: Record, findings: Findings) -> None:
    """What the answer of one client says about the server."""
    if record is None:
        findings.left += 1
        findings.left_by_clock += 1
        return
    if record.error:
        findings.lost.append(f"{record.error}: {record.detail}")
        return
    if job.parts is not None:
        findings.left += 1
        if not expected.text.startswith(record.text):
            findings.mixed_up.append(f"{record.text!r} does not begin {expected.text!r}")
        return
    findings.whole += 1
    findings.output_tokens += record.output_tokens
    findings.first_s.append(record.ttft)
    if (record.text, record.output_tokens) != (expected.text, expected.output_tokens):
        findings.mixed_up.append(f"{record.text!r} is not {expected.text!r}")


async def metric(client: LoadClient, name: str) -> float:
    rows = re.findall(rf"^noria:{name}(?:{{.*}})? (\S+)$", await client.get_text("/metrics"), re.MULTILINE)
    return sum(map(float, rows))


async def until_idle(client: LoadClient) -> float:
    """Seconds until nothing runs, waits or holds blocks; IDLE_S when that does not happen."""
    begin = time.perf_counter()
    while (waited := time.perf_counter() - begin) < IDLE_S:
        if not any([await metric(client, name) for name in BUSY]):
            return waited
        await asyncio.sleep(0.05)
    return IDLE_S


def faults(
    findings: Findings,
    asked: int,
    blocks: float,
    after: dict[str, float],
    compiles: float,
    memory: Sequence[Sequence[float]],
) -> list[str]:
    """memory: of each process in MiB, at the beginning and after each phase."""
    found = list[str]()
    if findings.lost:
        found.append(f"{len(findings.lost)} requests were lost, the first: {findings.lost[0]}")
    if findings.whole + findings.left + len(findings.lost) != asked:
        found.append(f"of {asked} requests {findings.whole} were answered and {findings.left} left")
    if findings.mixed_up:
        found.append(f"{len(findings.mixed_up)} answers were mixed up, the first: {findings.mixed_up[0]}")
    if busy := [name for name in BUSY if after[name]]:
        found.append(f"{busy[0]} is {after[busy[0]]:g} in the end")
    if after["kv_cache_blocks_free"] != blocks:
        found.append(f"{after['kv_cache_blocks_free']:g} blocks are free in the end, {blocks:g} were")
    if compiles:
        found.append(f"{compiles:g} programs were compiled")
    first, last = memory[1], memory[-1]
    if len(first) != len(last):
        found.append(f"there are {len(last)} processes in the end, {len(first)} were")
    for before, now in zip(first, last):
        if now - before > max(MEMORY_MIB, MEMORY_SHARE * before):
            found.append(f"a process grew from {before:g} to {now:g} MiB")
    return found


def milliseconds(seconds: Sequence[float], percent: float) -> float | None:
    return round(1e3 * percentile(sorted(seconds), percent), 1) if seconds else None


if __name__ == "__main__":
    main()
