"""noria plan: what it prints of a plan, and what it refuses. Plans themselves are tested in tests/aot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from command_line import Outcome

from noria.aot import devices, plan
from noria.aot.estimate import Speed
from noria.aot.hlo import Exchange
from noria.aot.programs import ProgramFigures
from noria.aot.roofline import Roofline
from noria.config import EngineConfig, ModelLimits
from noria.runner.memory import MemoryPlan

Noria = Callable[..., Outcome]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Plans are made up, with one program that compiles and one that does not; the configs they were asked for."""
    asked: list[EngineConfig] = []
    for name, _ in devices.ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that it is as before afterwards

    def make_plan(config: EngineConfig, model: Any, topology: Any, **_: Any) -> plan.Plan:
        asked.append(config)
        good = ProgramFigures(
            name="forward",
            bucket=16,
            seconds=2.0,
            flops=3e9,
            bytes=4e6,
            temporary=5_000_000,
            exchanges=(Exchange("all-reduce", 1000, 32),),
            sent=6e6,
        )
        bad = ProgramFigures(name="sample", bucket=8, seconds=1.0, error="Ran out of memory in [hbm]")
        return plan.Plan(
            topology=topology,
            tensor_parallel_size=config.tensor_parallel_size,
            config=config.resolve(ModelLimits(4096, 1000), "tpu"),
            dtype="bfloat16",
            parameters=10**9,
            memory=MemoryPlan(30 * 10**9, 8 * 10**9, 10**9, 10**6, 20_001, 78.125),
            programs=((good, Roofline(0.001, 0.002, 0.0005)), (bad, None)),
            decode=Speed(64, 2048, 64, 0.01),
            prefill=None,
        )

    monkeypatch.setattr(plan, "make_plan", make_plan)
    return asked


def test_the_table(noria: Noria, made_up: list[EngineConfig]) -> None:
    outcome = noria("plan", "llama-3.1-8b", "--topology", "v6e:2x4", "--max-num-seqs", "64")
    assert outcome.status == 1  # because a program does not compile
    assert outcome.out.startswith("llama-3.1-8b on v6e:2x4: 8 of 8 devices, bfloat16\n")
    row = next(line for line in outcome.out.splitlines() if line.startswith("forward"))
    assert row.split() == ["forward", "16", "2.0", "s", "3.00", "4.00", "2.500", "ms", "memory", "6.00", "5.0"]
    assert "does not compile: sample 8: Ran out of memory in [hbm]" in outcome.out
    assert "weights 8.00 GB, largest step 1.00 GB, KV cache 20.00 GB of 30.00 GB" in outcome.out
    assert "KV cache: 320,000 tokens, 78.1 requests of max_model_len (4,096)" in outcome.out
    assert "decode at best: 6,400 tokens/s with 64 requests of 2,048 tokens, 10.00 ms a step" in outcome.out
    assert "prefill" not in outcome.out
    assert made_up[0].tensor_parallel_size == 8
    assert made_up[0].max_num_seqs == 64


def test_json(noria: Noria, made_up: list[EngineConfig]) -> None:
    told = json.loads(noria("plan", "qwen2.5-7b", "--topology", "tpu7x:2x2x1", "--json").out)
    assert (told["topology"], told["devices"], told["tensor_parallel_size"]) == ("tpu7x:2x2x1", 8, 4)
    assert told["memory"]["cache"] == 20_001 * 10**6
    assert told["programs"][0]["roofline"]["seconds"] == pytest.approx(0.0025)
    assert told["programs"][0]["exchanges"] == [{"kind": "all-reduce", "bytes": 1000, "times": 32}]
    assert told["decode"]["tokens_per_s"] == pytest.approx(6400)
    assert told["prefill"] is None
    noria("plan", "qwen2.5-7b", "--topology", "v6e:1x1", "--tensor-parallel-size", "1")
    assert made_up[1].tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("llama-3.1-8b",), "--topology is missing"),
        (("llama-3.1-8b", "--topology", "v7:2x2"), "topology v7:2x2: the chip v7 is not known"),
        (("nothing", "--topology", "v6e:2x2"), "nothing is neither a folder with config.json"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--tensor-parallel-size", "-1"), "tensor_parallel_size must be at"),
    ],
)
def test_refused(noria: Noria, args: tuple[str, ...], message: str) -> None:
    outcome = noria("plan", *args)
    assert outcome.status != 0
    assert message in outcome.err
