"""A second model that drafts: answers stay what they are, and the more alike the two are, the more drafts are right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.config import StructuredOutputsParams
from noria.engine.draft_model import DraftModelProposer
from noria.errors import ConfigError

TEXTS = ["the mill the mill", "flour", "the miller waits and waits for the river", "A", "under the old mill"]
ENOUGH = 2**20  # bytes of the draft's cache: all requests fit


def config_of(model: Path, count: int = 4) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": count}


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "plain"])
def drafting(options: dict[str, Any], similar_model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    speculation = {"speculative_config": config_of(similar_model), "kv_cache_memory_bytes": ENOUGH}
    with LLM(**options, **speculation, async_scheduling=request.param) as llm:
        yield llm
        check_idle(llm)
        check_forgotten(llm)


def proposer_of(llm: LLM) -> DraftModelProposer:
    proposer = llm.engine.core.speculation._proposer
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def check_forgotten(llm: LLM) -> None:
    """Nothing is left of sequences that have ended, and the draft's pool is full again."""
    proposer = proposer_of(llm)
    assert not proposer._sequences
    for cache in proposer._caches:
        cache.check_integrity()
        assert cache.stats.num_used == 0
    assert proposer._runner.compiles_after_warmup == 0


def outputs_of(llm: LLM, params: Any, prompts: Any = TEXTS) -> list:
    return [(result.outputs, result.prompt_logprobs) for result in llm.generate(list(prompts), params)]


@pytest.mark.parametrize(
    "special",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": 30, "n": 3},
        {"max_tokens": 30, "stop": ["e", "th"], "stop_token_ids": list(range(40, 52))},
        {"max_tokens": 30, "logprobs": 3, "presence_penalty": 1.0},
        {"max_tokens": 30, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex="(ab|cd){4,20}"), "logprobs": 1},
    ],
    ids=str,
)
def test_answers_are_those_without_drafts(drafting: LLM, llm: LLM, special: dict[str, Any]) -> None:
    for how in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        params = SamplingParams(**{"ignore_eos": True} | how | special)
        assert outputs_of(drafting, params, TEXTS * 2) == outputs_of(llm, params, TEXTS * 2)
    check_forgotten(drafting)


def test_a_similar_model_is_often_right(drafting: LLM) -> None:
    rates = []
    for params in (
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=50, ignore_eos=True, seed=4),
    ):
        before = drafting.stats.speculation
        drafting.generate(TEXTS, params)
        after = drafting.stats.speculation
        proposed = after.num_draft_tokens - before.num_draft_tokens
        rates.append((after.num_accepted_tokens - before.num_accepted_tokens) / proposed)
    assert all(0.1 < rate < 1 for rate in rates), rates


def test_the_model_itself_is_always_right(options: dict[str, Any], tiny_text_model: Path, llm: LLM) -> None:
    """In prompts of several chunks, too, at every position, greedy or not."""
    prompts = [[5 + (seed * 7 + index) % 180 for index in range(3 + 5 * (seed % 8))] for seed in range(12)]
    given = [
        SamplingParams(temperature=seed % 3 / 2, seed=seed, max_tokens=24, ignore_eos=True, top_p=0.95)
        for seed in range(12)
    ]
    with LLM(**options, speculative_config=config_of(tiny_text_model, 5), kv_cache_memory_bytes=ENOUGH) as own:
        assert outputs_of(own, given, prompts) == outputs_of(llm, given, prompts)
        stats = own.stats.speculation
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
        assert stats.accepted_per_position == stats.proposed_per_position
        assert min(stats.proposed_per_position) > 0
        check_idle(own)
        check_forgotten(own)


@pytest.mark.parametrize("ahead", [True, False])
def test_small_pools(options: dict[str, Any], similar_model: Path, llm: LLM, ahead: bool) -> None:
    """The target's preempts; the draft's holds few sequences at a time, so that they take turns in it."""
    prompts = [[5 + (seed * 7 + index) % 180 for index in range(3 + 5 * (seed % 8))] for seed in range(20)]
    given = [SamplingParams(temperature=seed % 2 / 2, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(20)]
    small = options | {"num_blocks_override": 14, "kv_cache_memory_bytes": 82_000, "async_scheduling": ahead}
    with LLM(**small, speculative_config=config_of(similar_model)) as other:
        assert proposer_of(other)._caches[0].num_usable_blocks < 24
        assert outputs_of(other, given, prompts) == outputs_of(llm, given, prompts)
        assert other.stats.scheduler.num_preemptions > 0
        assert other.stats.speculation.num_accepted_tokens > 0
        check_idle(other)
        check_forgotten(other)


def test_a_draft_model_that_does_not_fit_is_refused(
    options: dict[str, Any], tiny_text_model: Path, tmp_path: Path
) -> None:
    def changed(name: str, file: str, change: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_text_model, folder)
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))
        return folder

    larger = changed("larger", "config.json", lambda config: config.update(vocab_size=200))
    shorter = changed("shorter", "config.json", lambda config: config.update(max_position_embeddings=32))

    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    other = changed("other", "tokenizer.json", swap)
    for model, complaint in ((larger, "vocabulary of 200"), (other, "another tokenizer"), (shorter, "32 positions")):
        with pytest.raises(ConfigError, match=complaint) as caught:
            LLM(**options, speculative_config=config_of(model))
        assert str(caught.value).startswith("speculative_config: the draft model")
