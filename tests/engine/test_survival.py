"""What an engine must survive: several threads, Ctrl-C, numbers gone wrong."""

from __future__ import annotations

import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from noria import LLM, SamplingParams


def test_several_threads_share_an_engine(llm: LLM) -> None:
    """Each gets what it would get alone, and the engine goes on."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[3 + index, 5, 7] for index in range(6)]
    expected = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].outputs[0].token_ids, prompts))
    assert found == expected


def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = llm.generate([3, 5, 7], params)[0].outputs[0].token_ids
    core, step = llm._front.engine.core, llm._front.engine.core._turn

    def interrupted_step() -> Any:
        signal.raise_signal(signal.SIGINT)
        return step()

    core._turn = interrupted_step
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([3, 5, 7], params)
    finally:
        core._turn = step
    assert llm.generate([3, 5, 7], params)[0].outputs[0].token_ids == expected
    assert llm.stats.scheduler.num_running == 0


def test_numbers_gone_wrong_are_an_error_not_an_answer(llm: LLM) -> None:
    """NaN in the weights: the request says so, and the engine goes on once they are mended."""
    runner = llm._front.engine.core.runner
    good = runner._weights
    runner._weights = dataclasses.replace(good, final_norm=good.final_norm * np.nan)
    try:
        [result] = llm.generate([3, 5, 7], SamplingParams(max_tokens=5, temperature=0.5, seed=1))
    finally:
        runner._weights = good
    assert result.outputs[0].finish_reason == "error"
    assert result.outputs[0].token_ids == []
    assert llm.generate([3, 5, 7], SamplingParams(max_tokens=5))[0].finished
