"""What a step costs on the host, without a model: schedule() and update() of a steady batch of decoding requests.

Run: python benchmarks/host_step.py [--requests 64 --prompt-tokens 512 --steps 512 --mixed]
Prints microseconds of processor time per step (median, 99th percentile), which neighbours on the machine do not change.
The device waits for this time in the plain loop; with run-ahead it is hidden behind the step in flight.
"""

from __future__ import annotations

import argparse
import statistics
import time

from noria.cache.layout import plan_layout
from noria.cache.paged_cache import PagedCache
from noria.config import SamplingParams
from noria.engine.request import Request
from noria.scheduler.schedule import StepResult
from noria.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


def measure(requests: int, prompt_tokens: int, steps: int, mixed: bool) -> dict[str, list[float]]:
    """Seconds per call, by kind: "admission" is the first step with its update, the others are of decode steps."""
    layout = plan_layout([512, 512, 512, 512, 512, None] * 3 if mixed else [None] * 30)
    max_model_len = prompt_tokens + steps + 2
    blocks = layout.num_groups * requests * (max_model_len // BLOCK_SIZE + 2) + 1
    cache = PagedCache(layout, blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        cache, max_num_seqs=requests, max_num_batched_tokens=requests * prompt_tokens, max_model_len=max_model_len
    )
    for i in range(requests):
        # Lengths differ, so that not all requests fill a block in the same step.
        prompt = [(i * 7919 + j) % 32000 for j in range(prompt_tokens - i % BLOCK_SIZE)]
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=None), key=i))
    result = StepResult({str(i): [i] for i in range(requests)})
    times: dict[str, list[float]] = {"admission": [], "schedule": [], "update": []}
    for step in range(steps):
        start = time.thread_time()
        schedule = scheduler.schedule()
        middle = time.thread_time()
        scheduler.update(schedule, result)
        end = time.thread_time()
        if step == 0:
            times["admission"].append(end - start)
        else:
            times["schedule"].append(middle - start)
            times["update"].append(end - middle)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the longest prompt, at least 16")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--mixed", action="store_true", help="15 sliding and 3 full layers instead of 30 full ones")
    args = parser.parse_args()
    times = measure(args.requests, args.prompt_tokens, args.steps, args.mixed)
    layers = "mixed" if args.mixed else "full"
    print(f"{args.requests} requests, prompts of {args.prompt_tokens} tokens, {layers} layers")
    for kind, seconds in times.items():
        micros = sorted(1e6 * s for s in seconds)
        median, p99 = statistics.median(micros), micros[int(0.99 * (len(micros) - 1))]
        print(f"{kind:10} median {median:9.1f} us   p99 {p99:9.1f} us")


if __name__ == "__main__":
    main()
