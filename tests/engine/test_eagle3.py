"""A draft head that follows the model: answers stay what they are, and drafts depend on nothing but the tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import CONFIG, random_tensors, save_head
from engine_checks import check_idle

from noria import LLM, SamplingParams
from noria.config import EngineConfig, StructuredOutputsParams
from noria.engine.startup import compile_programs
from noria.errors import ConfigError
from noria.spec.proposer import DraftLength, DraftRequest, Proposer

TEXTS = ["the mill the mill", "flour", "the miller waits and waits for the river", "A", "under the old mill"]


def config_of(head: Path, count: int = 4) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": count}


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "plain"])
def drafting(options: dict[str, Any], head: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**options, speculative_config=config_of(head), async_scheduling=request.param) as llm:
        yield llm
        check_idle(llm)


def outputs_of(llm: LLM, params: Any, prompts: Any = TEXTS) -> list:
    return [(result.outputs, result.prompt_logprobs) for result in llm.generate(list(prompts), params)]


@pytest.mark.parametrize(
    "special",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": 30, "n": 3},
        {"max_tokens": 30, "stop": ["e", "th"], "stop_token_ids": list(range(40, 52)), "min_tokens": 5},
        {"max_tokens": 30, "logprobs": 3, "presence_penalty": 1.0},
        {"max_tokens": 30, "logprobs": 0, "prompt_logprobs": 2},
        {"max_tokens": 30, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex="(ab|cd){4,20}"), "logprobs": 1},
    ],
    ids=str,
)
def test_answers_are_those_without_drafts(drafting: LLM, llm: LLM, special: dict[str, Any]) -> None:
    for how in ({"temperature": 0.0}, {"temperature": 2.0, "seed": 3}):
        params = SamplingParams(**{"ignore_eos": True} | how | special)
        assert outputs_of(drafting, params, TEXTS * 2) == outputs_of(llm, params, TEXTS * 2)


def test_some_drafts_are_right(drafting: LLM) -> None:
    drafting.generate(TEXTS, SamplingParams(temperature=4, max_tokens=50, ignore_eos=True, seed=1))
    stats = drafting.stats.speculation
    assert 0.05 < stats.acceptance_rate < 1
    assert stats.accepted_per_position[1] > 0


class Listening:
    """Another proposer, and what it proposed."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.drafts: dict[tuple[Any, ...], list[int]] = {}  # by the tokens known, and how they are sampled

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = self._proposer.propose(requests)
        for request, drafts in zip(requests, found):
            if drafts:
                key = (request.random_key, request.sampling_params.temperature, *request.token_ids)
                assert self.drafts.setdefault(key, drafts)[:1] == drafts[:1]
                self.drafts[key] = max(drafts, self.drafts[key], key=len)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


def listening(llm: LLM) -> Listening:
    speculation = llm.engine.core.speculation
    assert speculation._proposer is not None
    speculation._proposer = heard = Listening(speculation._proposer)
    return heard


@pytest.mark.slow
def test_drafts_depend_on_the_tokens_alone(
    options: dict[str, Any], head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on chunks, prefixes found in the cache, preemptions, bursts, wrong drafts before, or the company: so the
    head's cache is as good as the model's whatever happens."""
    monkeypatch.setattr(DraftLength, "wanted", lambda self, num_tokens: self.most if num_tokens % 5 else 0)
    common = [9 + i * 7 % 150 for i in range(24)]
    tails = [[*range(60, 60 + seed % 4), 5 + seed] for seed in range(16)]
    prompts = [[*common[: 8 * (seed % 4)], *tail] for seed, tail in enumerate(tails)]
    given = [
        SamplingParams(temperature=(0, 1.0, 4.0)[seed % 3], seed=seed, max_tokens=25, ignore_eos=True)
        for seed in range(16)
    ]
    quiet = options | {"max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with LLM(**quiet, speculative_config=config_of(head)) as alone:
        expected = listening(alone)
        for prompt, params in zip(prompts, given):
            alone.generate([prompt], params)
    for changes in ({"async_scheduling": False}, {"num_scheduler_steps": 4}):
        with LLM(**options | changes | {"num_blocks_override": 16}, speculative_config=config_of(head)) as llm:
            found = listening(llm)
            for _ in range(2):  # the second time more is found in the cache
                llm.generate(prompts, given)
            assert llm.stats.scheduler.num_preemptions > 0
            assert llm.stats.scheduler.cache.prefix_hits > 0
            check_idle(llm)
        same = found.drafts.keys() & expected.drafts.keys()
        assert len(same) > 100
        for key in same:
            count = min(len(found.drafts[key]), len(expected.drafts[key]))
            assert found.drafts[key][:count] == expected.drafts[key][:count]


def test_a_follow_up_finds_what_was_computed(drafting: LLM) -> None:
    """A block is found by those who go on like the one who made it; others begin with it anew."""
    prompt = [9 + i % 5 for i in range(12)]
    params = SamplingParams(temperature=4, max_tokens=40, ignore_eos=True, seed=5)
    [first] = drafting.generate([prompt], params)
    ids = [*prompt, *first.outputs[0].token_ids]
    ends = SamplingParams(temperature=0, max_tokens=3)
    [same] = drafting.generate([ids[:42]], ends)
    [other] = drafting.generate([[*ids[:40], (ids[40] + 1) % 150, 6]], ends)
    assert (same.num_cached_tokens, other.num_cached_tokens) == (40, 32)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_small_pool(options: dict[str, Any], head: Path, llm: LLM, ahead: bool) -> None:
    prompts = [[5 + (seed * 7 + index) % 180 for index in range(3 + 5 * (seed % 8))] for seed in range(20)]
    given = [
        SamplingParams(temperature=(0, 1.0, 4.0)[seed % 3], seed=seed, max_tokens=30, ignore_eos=True)
        for seed in range(20)
    ]
    small = options | {"num_blocks_override": 14, "async_scheduling": ahead}
    with LLM(**small, speculative_config=config_of(head, 7)) as other:
        assert outputs_of(other, given, prompts) == outputs_of(llm, given, prompts)
        assert other.stats.scheduler.num_preemptions > 0
        assert other.stats.speculation.num_accepted_tokens > 0
        check_idle(other)


def test_a_head_in_8_bits_and_one_of_all_tokens(options: dict[str, Any], tmp_path: Path, llm: LLM) -> None:
    config = CONFIG | {"draft_vocab_size": CONFIG["vocab_size"]}
    tensors = random_tensors(config)
    del tensors["d2t"], tensors["t2d"]
    head = save_head(tmp_path / "head", config, tensors)
    params = SamplingParams(temperature=4, seed=2, max_tokens=30, ignore_eos=True)
    with LLM(**options, speculative_config=config_of(head) | {"quantization": "int8"}) as other:
        assert outputs_of(other, params) == outputs_of(llm, params)
        assert other.stats.speculation.num_accepted_tokens > 0
        check_idle(other)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, but the model's hidden_size is 32"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48"),
        ({"vocab_size": 200}, "vocab_size is 200, but the model's vocab_size is 192"),
        ({"draft_vocab_size": 193}, "must not exceed"),
        ({"draft_vocab_size": 100}, "d2t|lm_head.weight has shape"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"num_hidden_layers": 2}, "has one layer"),
        ({"num_attention_heads": 5}, "must be a multiple"),
        ({"intermediate_size": 40}, "mlp.gate_proj.weight has shape"),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            r"layers of the model's 2, not \[2, 1, -1",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, "must be three different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "must be three different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "must be three different layers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must be three different layers"),
        ({"norm_before_residual": True}, "norm_before_residual is not supported"),
        ({"hidden_act": "relu"}, "hidden_act relu"),
    ],
    ids=str,
)
def test_a_head_of_another_model_is_refused(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    refused(options, save_head(tmp_path / "head", config, random_tensors(CONFIG)), complaint)


def refused(options: dict[str, Any], head: Path, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        LLM(**options, speculative_config=config_of(head))
    message = str(caught.value)
    assert message.startswith(f"speculative_config: the draft head {head}: ")
    assert "\n" not in message


def test_a_head_that_is_incomplete_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    refused(options, tmp_path / "nowhere", "nowhere")
    (tmp_path / "empty").mkdir()
    refused(options, tmp_path / "empty", "no config.json")
    refused(options, save_head(tmp_path / "none", CONFIG, {}), "has no tensor")
    whole = random_tensors(CONFIG)
    for name in ("fc.weight", "d2t", "midlayer.hidden_norm.weight", "lm_head.weight"):
        tensors = {key: value for key, value in whole.items() if key != name}
        refused(options, save_head(tmp_path / f"without {name}", CONFIG, tensors), f"has no tensor {name}")
    shifted = copy.deepcopy(whole)
    shifted["d2t"][-1] = 192
    refused(options, save_head(tmp_path / "shifted", CONFIG, shifted), "tensor d2t does not name different tokens")
    floats = whole | {"d2t": whole["d2t"].astype(np.float32)}
    refused(options, save_head(tmp_path / "floats", CONFIG, floats), "tensor d2t has the dtype F32")


def test_the_model_itself_is_no_head(options: dict[str, Any]) -> None:
    refused(options, Path(options["model"]), "is no EAGLE-3 head")


@pytest.mark.slow
def test_programs_without_weights(options: dict[str, Any], head: Path, tmp_path: Path) -> None:
    """`noria compile` fills the cache with what a start needs, the head's programs included."""
    fresh = options | {"compile_cache_dir": str(tmp_path), "max_num_seqs": 2, "num_scheduler_steps": 2}
    fresh["speculative_config"] = config_of(head)
    report = compile_programs(EngineConfig.from_options(**fresh))
    assert report.compiled > 0
    with LLM(**fresh) as llm:
        assert (llm.engine.report.programs, llm.engine.report.compiled) == (report.programs, 0)
        [result] = llm.generate(["the"], SamplingParams(temperature=4, seed=1, max_tokens=30, ignore_eos=True))
        assert len(result.outputs[0].token_ids) == 30
        check_idle(llm)


def test_what_a_head_takes(options: dict[str, Any], head: Path, llm: LLM) -> None:
    """Its weights and its layer of cache are in the memory plan."""
    with LLM(**options, speculative_config=config_of(head)) as other:
        plan, plain = other.engine.report.memory, llm.engine.report.memory
        assert plan.block_bytes - plain.block_bytes == 8 * 2 * 2 * 12 * 4
        expected = sum(t.size * 4 for name, t in random_tensors(CONFIG).items() if name != "t2d")
        assert 1 <= (plan.weights - plain.weights) / expected < 1.2  # packed weights are padded
        assert plan.activations > plain.activations
