"""What benchmarks/many_clients.py finds, with faults planted; and the whole of it on a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import many_clients
import pytest
from many_clients import Findings, Job

from noria.bench.client import LoadClient
from noria.bench.records import Question, Record

ALONE = Record(0.0, [0.1, 0.2, 0.3], 0.3, 5, 3, text="the wheel turns")


def answer(text: str, tokens: int = 3, **rest: Any) -> Record:
    return Record(0.0, [0.1, 0.3], 0.3, 5, tokens, text=text, **rest)


@pytest.mark.parametrize(
    ("job", "record", "seen"),
    [
        (Job(0), answer("the wheel turns"), {"whole": 1}),
        (Job(0), answer("the mill turns"), {"whole": 1, "mixed_up": 1}),
        (Job(0), answer("the wheel turn"), {"whole": 1, "mixed_up": 1}),
        (Job(0), answer("the wheel turns", tokens=4), {"whole": 1, "mixed_up": 1}),
        (Job(0), answer("the", error="cut"), {"lost": 1}),
        (Job(0, parts=2), answer("the wheel"), {"left": 1}),
        (Job(0, parts=2), answer("the mill"), {"left": 1, "mixed_up": 1}),
        (Job(0, parts=2), answer("", error="HTTP 500"), {"lost": 1}),
        (Job(0, seconds=1.0), None, {"left": 1, "left_by_clock": 1}),
    ],
)
def test_what_one_answer_says(job: Job, record: Record | None, seen: dict[str, int]) -> None:
    findings = Findings()
    many_clients.note(job, record, ALONE, findings)
    counts = {"whole": findings.whole, "left": findings.left, "left_by_clock": findings.left_by_clock}
    counts |= {"lost": len(findings.lost), "mixed_up": len(findings.mixed_up)}
    assert {name: count for name, count in counts.items() if count} == seen


GOOD: dict[str, Any] = {
    "blocks": 100.0,
    "after": dict.fromkeys(many_clients.BUSY, 0.0) | {"kv_cache_blocks_free": 100.0},
    "compiles": 0.0,
    "memory": [[50.0, 500.0], [60.0, 600.0], [66.0, 606.0]],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"blocks": 101.0}, "100 blocks are free in the end, 101 were"),
        ({"compiles": 2.0}, "2 programs were compiled"),
        ({"after": GOOD["after"] | {"num_requests_waiting": 1.0}}, "num_requests_waiting is 1 in the end"),
        ({"memory": [[50.0], [60.0], [69.0]]}, "a process grew from 60 to 69 MiB"),
        ({"memory": [[50.0], [600.0], [611.0]]}, None),
        ({"memory": [[50.0], [600.0], [613.0]]}, "a process grew from 600 to 613 MiB"),
        ({"memory": [[50.0, 5.0], [60.0, 5.0], [60.0]]}, "there are 1 processes in the end, 2 were"),
    ],
)
def test_faults_of_a_server(change: dict[str, Any], message: str | None) -> None:
    found = many_clients.faults(Findings(whole=7, left=3), 10, **{**GOOD, **change})
    assert found == ([] if message is None else [message])


def test_faults_of_answers() -> None:
    findings = Findings(whole=6, left=3, lost=["cut: "], mixed_up=["x is not y"])
    assert len(many_clients.faults(findings, 10, **GOOD)) == 2
    [missing] = many_clients.faults(Findings(whole=6, left=3), 10, **GOOD)
    assert missing == "of 10 requests 6 were answered and 3 left"


def test_a_third_leaves() -> None:
    args = argparse.Namespace(requests=300, leaving=1 / 3)
    jobs = many_clients.make_jobs(args, [ALONE, ALONE], random.Random(1))
    assert len(jobs) == 300
    by_parts = [job.parts for job in jobs if job.parts is not None]
    by_clock = [job.seconds for job in jobs if job.seconds is not None]
    assert len(by_parts) + len(by_clock) == 100
    assert min(len(by_parts), len(by_clock)) > 30
    assert set(by_parts) == {1, 2}
    assert all(0 <= seconds <= 0.3 for seconds in by_clock)


def test_who_leaves_by_the_clock_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()

    async def ask(self: LoadClient, question: Question, *, leave_after: int | None = None) -> Record:
        try:
            await asyncio.sleep(question.output_len)
            return ALONE
        finally:
            ended.append("closed")

    monkeypatch.setattr(LoadClient, "ask", ask)

    async def work() -> None:
        async with LoadClient("http://127.0.0.1:9", "/v1/completions") as client:
            assert await many_clients.ask(client, Question("a", 60), Job(0, seconds=0.01)) is None
            assert ended == ["closed"]
            assert await many_clients.ask(client, Question("a", 0), Job(0, seconds=10.0)) is ALONE
            assert await many_clients.ask(client, Question("a", 0), Job(0)) is ALONE

    asyncio.run(work())


@pytest.mark.slow
def test_a_tiny_model(
    tiny_text_model: Path, compile_cache_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.jsonl"
    sizes = ["--clients", "20", "--requests", "100", "--prompts", "16", "--input-len", "20", "--output-len", "30"]
    # Half as many blocks as eight requests of full length need, so some are preempted.
    engine = ["--max-num-seqs=8", "--max-model-len=256", "--max-num-batched-tokens=32", "--num-blocks-override=33"]
    engine.append(f"--compile-cache-dir={compile_cache_dir}")
    options = [f"--noria-option={option}" for option in engine]
    arguments = ["x", "--model", str(tiny_text_model), *sizes, *options, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    many_clients.main()
    found = json.loads(output.read_text())
    assert found["whole"] + found["left"] == 100
    assert found["left"] > 20
    assert (found["lost"], found["mixed_up"], found["compiles_after_warmup"], found["faults"]) == (0, 0, 0, [])
