"""Log-probabilities and penalties of the engine against the golden logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import ModelPrompt, model_cases

from noria import LLM, SamplingParams
from noria.engine.logprobs import Logprob

CASES = {case.name: case for case in model_cases()}
NUM_TOP = 6


def prompts_of(name: str) -> list[ModelPrompt]:
    return [prompt for prompt in CASES[name].prompts if prompt.logits is not None]


def engine(name: str, compile_cache_dir: str, **options: Any) -> LLM:
    """With steps so small that prompts are cut."""
    return LLM(
        str(CASES[name].folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=8,
        num_blocks_override=200,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        strict_compile=True,
        compile_cache_dir=compile_cache_dir,
        **options,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(found: dict[int, Logprob], token_id: int, golden: np.ndarray) -> None:
    """golden: log-probabilities [V]."""
    assert next(iter(found)) == token_id
    for other, logprob in found.items():
        assert logprob.logprob == pytest.approx(golden[other], abs=1e-3)
    assert found[token_id].rank == pytest.approx(1 + (golden > golden[token_id]).sum(), abs=1)
    best = np.argsort(-golden, kind="stable")[:NUM_TOP]
    top = sorted(found.values(), key=lambda logprob: logprob.rank)[:NUM_TOP]
    np.testing.assert_allclose([logprob.logprob for logprob in top], golden[best], atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-untied-window"])
def test_of_prompts_and_of_what_follows_every_beginning(name: str, compile_cache_dir: str):
    prompts = prompts_of(name)
    assert prompts
    params = SamplingParams(
        temperature=0.9, seed=5, max_tokens=1, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
    )
    with engine(name, compile_cache_dir) as llm:
        beginnings = [
            (p, stop) for p in prompts for stop in sorted({1, 2, 7, 17, len(p.token_ids)}) if stop <= len(p.token_ids)
        ]
        answers = llm.generate([list(p.token_ids[:stop]) for p, stop in beginnings], params)
        assert llm.stats.compiles_after_warmup == 0
    for (prompt, stop), answer in zip(beginnings, answers, strict=True):
        assert prompt.logits is not None
        golden = log_softmax(prompt.logits)
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        for place, found in enumerate(answer.prompt_logprobs[1:], 1):
            assert found is not None
            check(found, prompt.token_ids[place], golden[place - 1])
        [output] = answer.outputs
        assert output.logprobs is not None
        check(output.logprobs[0], output.token_ids[0], golden[stop - 1])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_repetition_penalty(name: str, compile_cache_dir: str):
    """Its effect depends on the sign of a logit, which log-probabilities do not tell."""
    prompts = prompts_of(name)
    penalties = [0.5, 1.05, 1.3, 2.0, 10.0]
    jobs = [(p, stop, penalty) for p in prompts for stop in range(3, len(p.token_ids) + 1, 9) for penalty in penalties]
    with engine(name, compile_cache_dir, logprobs_mode="processed_logprobs") as llm:
        answers = llm.generate(
            [list(p.token_ids[:stop]) for p, stop, _ in jobs],
            [
                SamplingParams(
                    temperature=0, max_tokens=1, ignore_eos=True, repetition_penalty=penalty, logprobs=NUM_TOP
                )
                for _, _, penalty in jobs
            ],
        )
    changed = 0
    for (prompt, stop, penalty), answer in zip(jobs, answers, strict=True):
        assert prompt.logits is not None
        logits = prompt.logits[stop - 1].astype(np.float64)
        for token in set(prompt.token_ids[:stop]):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        [token_id] = answer.outputs[0].token_ids
        assert logits[token_id] > logits.max() - 1e-3
        changed += token_id != prompt.logits[stop - 1].argmax()
        assert answer.outputs[0].logprobs is not None
        check(answer.outputs[0].logprobs[0], token_id, log_softmax(logits))
    assert changed > 3
