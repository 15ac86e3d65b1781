"""llama.cpp, through llama-cpp-python, on the workloads of one request. Run it in an environment of its own:

VENV/bin/python benchmarks/peers/llama_cpp_python.py MODEL.gguf WORKLOADS.json
"""

from __future__ import annotations

import os
import time

from common import Requests, arguments, chosen, line, measure


def main() -> None:
    begin = time.perf_counter()
    args = arguments("llama.cpp", ["prefill", "single"])
    from llama_cpp import Llama

    cores = len(os.sched_getaffinity(0))
    llm = Llama(args.model, n_ctx=2048, n_batch=512, n_threads=cores, n_threads_batch=cores, verbose=False)

    def generate(prompt: list[int], count: int) -> list[int]:
        llm.eval(prompt)
        tokens = [llm.sample(temp=0.0)]
        while len(tokens) < count:
            llm.eval(tokens[-1:])
            tokens.append(llm.sample(temp=0.0))
        return tokens

    workloads = list(chosen(args))
    generate(workloads[0][1][0][0][:8], 1)
    line("llama.cpp", "startup", time_to_first_token_s=round(time.perf_counter() - begin, 3))

    def run(requests: Requests) -> list[list[int]]:
        return [generate(prompt, count) for prompt, count in requests]

    for name, requests in workloads:
        measure("llama.cpp", name, requests, args.repetitions, run, llm.reset)


if __name__ == "__main__":
    main()
