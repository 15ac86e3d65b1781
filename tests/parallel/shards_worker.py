"""Runs the same requests on one device and on several, in a process that has eight, and prints what came as JSON.

Its argument is JSON: a model folder, the engines (options of each by name; `slices` is the number of machines that the
devices are to belong to), whether the model speaks, whether only a few requests come, and the folder for compiled
programs.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from noria import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from noria.parallel import mesh

PREFIX = [3, 11, 12, 13, 14, 15, 16, 17, 18, 19]  # more than a block, less than two
PROMPTS = [[*PREFIX, *range(20 + index, 27 + 3 * index)] for index in range(7)]


def shaped(speaks: bool) -> list[SamplingParams]:
    """One for each prompt; nobody ends early, so that all overlap."""
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    follow = StructuredOutputsParams(regex="(water|wheel)( [a-z]{2,6}){3}") if speaks else None
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(seed=1, n=2, **common),
        SamplingParams(seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, **common),
        SamplingParams(seed=3, presence_penalty=0.5, repetition_penalty=1.2, logprobs=3, **common),
        SamplingParams(temperature=0, prompt_logprobs=2, logprobs=0, frequency_penalty=0.3, **common),
        SamplingParams(seed=4, logit_bias={5: 3.0}, bad_token_ids=[7, 8], min_tokens=4, **common),
        SamplingParams(seed=5, structured_outputs=follow, max_tokens=20),
    ]


def few() -> list[tuple[list[list[int]], SamplingParams]]:
    """Fewer requests than ranks: one, and three of very different lengths."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    return [([PREFIX[:3]], params), ([[4], [*range(20, 81)], [*range(90, 103)]], params)]


def plain() -> list[SamplingParams]:
    """What runs in bursts."""
    return [SamplingParams(temperature=index % 2, seed=index, max_tokens=12, ignore_eos=True) for index in range(7)]


def told(answers: list[RequestOutput]) -> list[dict[str, Any]]:
    one = lambda place: [(token_id, float(p.logprob), p.rank) for token_id, p in (place or {}).items()]
    logprobs = lambda places: [one(place) for place in places or []]
    return [
        {
            "token_ids": [list(output.token_ids) for output in answer.outputs],
            "logprobs": [logprobs(output.logprobs) for output in answer.outputs],
            "prompt_logprobs": logprobs(answer.prompt_logprobs),
            "cached": answer.num_cached_tokens,
        }
        for answer in answers
    ]


def engine_options(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": job["model"],
        "skip_tokenizer_init": not job["speaks"],
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "num_blocks_override": 120,
        "num_scheduler_steps": 4,
        "attention_backend": "xla",
        "linear_backend": "xla",
        "compile_cache_dir": job["compile_cache_dir"],
        "strict_compile": True,
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = {}
    for name, options in job["engines"].items():
        slices = options.pop("slices", 1)
        by_slice = lambda devices, slices=slices: [list(devices[index::slices]) for index in range(slices)]
        with patch.object(mesh, "_by_slice", by_slice), LLM(**engine_options(job) | options) as llm:
            many = () if job["few"] else (shaped(job["speaks"]), shaped(job["speaks"]), plain())
            runs = [llm.generate(prompts, params) for params in many]
            runs += [llm.generate([{"prompt_token_ids": each} for each in some], params) for some, params in few()]
            found[name] = [told(answers) for answers in runs]
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
