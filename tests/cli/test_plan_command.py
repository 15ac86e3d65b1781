"""noria plan: what it prints of a plan, and what it refuses. Plans themselves are tested in tests/aot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from command_line import Outcome

from noria.aot import plan, search
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

    def make_plan(config: EngineConfig, model: Any, topology: Any, **_: Any) -> plan.Plan:
        asked.append(config)
        good = ProgramFigures(
            name="forward",
            bucket=16,
            seconds=2.0,
            flops=3e9,
            bytes=4e6,
            arguments=7_000_000,
            temporary=5_000_000,
            exchanges=(Exchange("all-reduce", 1000, 32, 4),),
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
    assert row.split() == ["forward", "16", "2.0", "s", "3.00", "4.00", "2.500", "ms", "memory", "6.00", "7.0", "5.0"]
    assert "does not compile: sample 8: Ran out of memory in [hbm]" in outcome.out
    assert "weights 8.00 GB, largest step 1.00 GB, KV cache 20.00 GB of 30.00 GB" in outcome.out
    assert "KV cache: 320,000 tokens, 78.1 requests of max_model_len (4,096)" in outcome.out
    assert "decode at best: 6,400 tokens/s with 64 requests of 2,048 tokens, 10.00 ms a step" in outcome.out
    assert "prefill" not in outcome.out
    assert made_up[0].tensor_parallel_size == 8
    assert made_up[0].max_num_seqs == 64


def test_what_a_search_found(noria: Noria, made_up: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is for what is recommended."""

    def found(config: EngineConfig, *_: Any, **__: Any) -> search.Search:
        no = search.MeshChoice(tensor_parallel_size=1, copies=8, reason="it does not fit")
        slow, fast = Speed(8, 100, 8, 0.01), Speed(16, 100, 16, 0.005)
        two = search.MeshChoice(tensor_parallel_size=2, copies=4, cache_tokens=3000, decode=slow, prefill=slow)
        four = search.MeshChoice(tensor_parallel_size=4, copies=2, cache_tokens=7000, decode=fast, prefill=fast)
        parts = dataclasses.replace(two, tensor_parallel_size=4, attention_data_parallel_size=2, copies=1)
        uneven = dataclasses.replace(no, attention_data_parallel_size=8, copies=1, reason="use 8")
        gap = search.BucketChoice(token_bucket_gap=256, programs=18, waste=0.034)
        best = dataclasses.replace(config, tensor_parallel_size=4, token_bucket_gap=256)
        return search.Search(meshes=(no, two, four, parts, uneven), buckets=(gap,), config=best)

    monkeypatch.setattr(search, "search", found)
    args = ("plan", "llama-3.1-8b", "--topology", "v6e:2x4", "--search")
    out = noria(*args).out
    lines = [line.split() for line in out.splitlines()]
    assert ["2", "1", "4", "3,000", "8", "10.00", "3,200", "3,200"] in lines
    assert ["*", "4", "1", "2", "7,000", "16", "5.00", "6,400", "6,400"] in lines
    assert ["4", "2", "1", "3,000", "8", "10.00", "800", "800"] in lines
    assert "tensor parallel 1: it does not fit" in out
    assert "tensor parallel 1, attention data 8: use 8" in out
    assert "* token_bucket_gap 256: 18 programs, padding takes 3.4% more time" in out
    assert "recommended: --tensor-parallel-size 4 --token-bucket-gap 256" in out
    assert (made_up[0].tensor_parallel_size, made_up[0].token_bucket_gap) == (4, 256)
    told = json.loads(noria(*args, "--json").out)["search"]
    assert [each["tokens_per_s"] for each in told["meshes"]] == [0, 3200, 6400, 800, 0]
    assert told["buckets"] == [{"token_bucket_gap": 256, "programs": 18, "waste": 0.034}]


def test_attention_divided_by_request(noria: Noria, made_up: list[EngineConfig]) -> None:
    """Without a tensor_parallel_size as many devices as are left share each part."""
    args = ("plan", "llama-3.1-8b", "--topology", "v6e:2x4", "--attention-data-parallel-size", "2")
    assert noria(*args).out.startswith("llama-3.1-8b on v6e:2x4: 8 of 8 devices, attention in 2 parts by request, bf")
    told = json.loads(noria(*args, "--json").out)
    assert (told["attention_data_parallel_size"], told["tensor_parallel_size"]) == (2, 4)
    assert made_up[0].num_devices == 8


def test_a_search_that_recommends_attention_divided_by_request(
    noria: Noria, made_up: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(config: EngineConfig, *_: Any, **__: Any) -> search.Search:
        speed = Speed(8, 100, 8, 0.01)
        parts = search.MeshChoice(
            tensor_parallel_size=2, attention_data_parallel_size=4, copies=1, decode=speed, prefill=speed
        )
        best = dataclasses.replace(config, tensor_parallel_size=2, attention_data_parallel_size=4)
        return search.Search(meshes=(parts,), buckets=(), config=best)

    monkeypatch.setattr(search, "search", found)
    out = noria("plan", "llama-3.1-8b", "--topology", "v6e:2x4", "--search").out
    assert "recommended: --tensor-parallel-size 2 --attention-data-parallel-size 4 --token-bucket-gap 0" in out
    assert made_up[0].num_devices == 8


def test_json(noria: Noria, made_up: list[EngineConfig]) -> None:
    told = json.loads(noria("plan", "qwen2.5-7b", "--topology", "tpu7x:2x2x1", "--json").out)
    assert (told["topology"], told["devices"], told["tensor_parallel_size"]) == ("tpu7x:2x2x1", 8, 4)
    assert told["memory"]["cache"] == 20_001 * 10**6
    assert told["programs"][0]["roofline"]["seconds"] == pytest.approx(0.0025)
    assert told["programs"][0]["exchanges"] == [{"kind": "all-reduce", "bytes": 1000, "times": 32, "devices": 4}]
    assert told["decode"]["tokens_per_s"] == pytest.approx(6400)
    assert told["prefill"] is None
    noria("plan", "qwen2.5-7b", "--topology", "v6e:1x1", "--tensor-parallel-size", "1")
    assert made_up[1].tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("llama-3.1-8b",), "--topology is missing"),
        (("llama-3.1-8b", "--topology", "v7:2x2"), "topology v7:2x2: the chip v7 is not known"),
        (
            ("llama-3.1-8b", "--topology", "v6e:2x2", "--device", "gpu"),
            "device gpu: --topology names TPUs to compile for",
        ),
        (("nothing", "--topology", "v6e:2x2"), "nothing is neither a folder with config.json"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--tensor-parallel-size", "-1"), "tensor_parallel_size must be at"),
        (("llama-3.1-8b", "--topology", "v6e:2x2", "--num-slices", "0"), "num_slices must be at least 1, not 0"),
        (
            ("llama-3.1-8b", "--topology", "v6e:2x2", "--search", "--tensor-parallel-size", "2"),
            "--search chooses the tensor_parallel_size; leave one of them out",
        ),
    ],
)
def test_refused(noria: Noria, args: tuple[str, ...], message: str) -> None:
    outcome = noria("plan", *args)
    assert outcome.status != 0
    assert message in outcome.err
