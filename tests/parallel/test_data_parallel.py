"""Requests on ranks answer like those on one device: whole engines in a process that has eight CPU devices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from test_tensor_parallel import GOLDEN, flat, run

from noria import LLM
from noria.config import EngineConfig, ModelLimits
from noria.errors import ConfigError

DATA_2 = {"data_parallel_size": 2}
DATA_2_TENSOR_2 = {**DATA_2, "tensor_parallel_size": 2}
ATTENTION_2 = {"attention_data_parallel_size": 2}
ATTENTION_4 = {"attention_data_parallel_size": 4}
ALL_AXES = {**DATA_2, **ATTENTION_2, "tensor_parallel_size": 2}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}


def check(found: dict[str, Any]) -> None:
    """Tokens are the same; log-probabilities differ by what another order of sums makes, and ranks by the neighbour
    whose log-probability is as good as the same.

    How much is found in the prefix cache is a matter of who was where, but something is, in the runs that repeat.
    """
    alone, *others = found.values()
    for other in others:
        for answer, same in zip(itertools.chain(*other), itertools.chain(*alone), strict=True):
            assert answer["token_ids"] == same["token_ids"]
            for (token, logprob, rank), (token2, logprob2, rank2) in zip(flat(answer), flat(same), strict=True):
                assert token == token2
                assert abs(rank - rank2) <= 1
                assert logprob == pytest.approx(logprob2, abs=2e-4)
        for repeated in other[1:3]:
            assert sum(answer["cached"] >= 8 for answer in repeated) >= len(repeated) - 2


@pytest.mark.slow
def test_ranks_along_both_axes_answer_like_one_device(tiny_text_model: Path, compile_cache_dir: str) -> None:
    """Every kind of request at once, bursts, fewer requests than ranks; on 2 x 2 ranks of 2 devices, in 2 slices."""
    found = run(tiny_text_model, {"one": {}, "eight": {**ALL_AXES, "slices": 2}}, compile_cache_dir, speaks=True)
    check(found)
    assert any(answer["logprobs"][0] for answer in found["eight"][0])
    assert any(answer["prompt_logprobs"] for answer in found["eight"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "engines",
    [
        {"data 2": DATA_2, "data 2 x tensor 2": DATA_2_TENSOR_2, "2 slices": {**DATA_2_TENSOR_2, "slices": 2}},
        {
            "attention-data 2": {**ATTENTION_2, "device_order": [6, 1]},
            "attention-data 4": ATTENTION_4,
            "attention-data 2 x tensor 4": {**ATTENTION_2, "tensor_parallel_size": 4},
        },
        {"8 ranks": {"data_parallel_size": 8}},
    ],
    ids=["data", "attention-data", "8 ranks"],
)
def test_every_shape(tiny_text_model: Path, compile_cache_dir: str, engines: dict[str, dict[str, Any]]) -> None:
    check(run(tiny_text_model, {"one": {}, **engines}, compile_cache_dir, speaks=True))


@pytest.mark.slow
def test_with_speculation(tiny_text_model: Path, compile_cache_dir: str) -> None:
    engines: dict[str, dict[str, Any]] = {
        "one": {},
        "data 2 x tensor 2": {**DATA_2_TENSOR_2, **DRAFTS},
        "attention-data 4": {**ATTENTION_4, **DRAFTS},
        "not ahead": {**ALL_AXES, **DRAFTS, "async_scheduling": False},
    }
    check(run(tiny_text_model, engines, compile_cache_dir, speaks=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama-bias-linear-rope", "mistral-window", "qwen2", "qwen2-untied-window", "qwen3", "gemma3"]
)
def test_families(family: str, compile_cache_dir: str) -> None:
    engines: dict[str, dict[str, Any]] = {
        "one": {},
        "data 2 x tensor 2": DATA_2_TENSOR_2,
        "attention-data 2 x tensor 2": {**ATTENTION_2, "tensor_parallel_size": 2},
        "attention-data 4": ATTENTION_4,
    }
    check(run(GOLDEN / family, engines, compile_cache_dir))


@pytest.mark.slow
def test_preemption_on_every_rank(tiny_text_model: Path, compile_cache_dir: str) -> None:
    """A pool in which the requests of a rank do not fit together."""
    small = {"num_blocks_override": 14}
    engines = {"one": {}, "two": {**DATA_2, **small}, "four": {**ATTENTION_4, **small}}
    check(run(tiny_text_model, engines, compile_cache_dir, speaks=True))


@pytest.mark.slow
def test_idle_ranks_with_experts(compile_cache_dir: str) -> None:
    """One request, so that a rank has none, and three of very different lengths: every bit is that of one device."""
    once = {"num_scheduler_steps": 1}
    found = run(GOLDEN / "mixtral", {"one": once, "data 2": {**once, **DATA_2}}, compile_cache_dir, few=True)
    assert [len(answers) for answers in found["one"]] == [1, 3]
    assert all(len(answer["token_ids"][0]) == 6 and flat(answer) for answers in found["one"] for answer in answers)
    assert found["data 2"] == found["one"]


@pytest.mark.slow
def test_experts(compile_cache_dir: str) -> None:
    """Of each copy of the model for its own tokens; divided along both axes that may share them."""
    engines: dict[str, dict[str, Any]] = {
        "one": {},
        "data 2": DATA_2,
        "all": {**DATA_2, **ATTENTION_2, "expert_parallel_size": 2},
    }
    check(run(GOLDEN / "mixtral", engines, compile_cache_dir))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe-dense-first", "deepseek-v3"])
def test_families_with_experts(family: str, compile_cache_dir: str) -> None:
    engines: dict[str, dict[str, Any]] = {"one": {}, "data 2": DATA_2, "attention-data 2": ATTENTION_2}
    check(run(GOLDEN / family, engines, compile_cache_dir))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"attention_data_parallel_size": -1}, "attention_data_parallel_size must be at least 1"),
        ({"data_parallel_size": 64}, r"data_parallel_size \(64\) needs 64 devices, but there are \d+ here"),
        (
            {"data_parallel_size": 16, "tensor_parallel_size": 4},
            r"data_parallel_size \(16\) x tensor_parallel_size \(4\) needs 64 devices",
        ),
    ],
)
def test_meshes_that_cannot_be_had(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(GOLDEN / "llama"), skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**ALL_AXES, "max_num_seqs": 10},
            r"max_num_seqs \(10\) must be a multiple of .* x attention_data_parallel_size \(4\).*use 12",
        ),
        ({**DATA_2, "nnodes": 2}, "attention_data_parallel_size work on one host, not with nnodes 2; leave them out"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="", **options).resolve(ModelLimits(64, 100), "cpu")


def test_defaults_grow_with_the_copies_of_the_model() -> None:
    limits = ModelLimits(2048, 100)
    sizes = lambda **options: (lambda c: (c.max_num_seqs, c.max_num_batched_tokens))(
        EngineConfig(model="", **options).resolve(limits, "tpu")
    )
    assert sizes() == (256, 2048)
    assert sizes(**DATA_2) == sizes(**ALL_AXES) == (512, 4096)
    assert sizes(**ATTENTION_4) == (256, 2048)
    assert sizes(attention_data_parallel_size=3) == (258, 2048)
