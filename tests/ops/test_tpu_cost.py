"""The count of the TPU kernel's work: against the copies it makes, by hand, and against what the compiler is told."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_ragged_paged_attention import FULL_ATTENTION, World, address

from noria.ops.ragged_paged_attention import tpu_cost, tpu_sizes
from noria.ops.ragged_paged_attention.tpu_cost import Count, count
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes

LLAMA_8B = Lines(8, 128, "bfloat16")


def test_decode_by_hand() -> None:
    """64 rows of Llama 3.1 8B, 1000 tokens before: the cache once, but for what is left of the last page."""
    sizes = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 64, 256)
    found = count(sizes, [(1000, 1)] * 64)
    token = 2 * 8 * 128 * 2  # keys and values of 8 heads in bfloat16
    queries = 32 * 128 * 2
    assert found.cache_read == 64 * 63 * 16 * token
    assert found.cache_written == 64 * token
    assert found.queries == found.results == 64 * queries
    least = 64 * (1001 * token + 2 * token + 2 * queries)
    assert found.bytes < 1.01 * least
    # Two chunks of 512 tokens: keys are 4 blocks of 128 by 128 for each of 8 heads, values as many, and the 4 queries
    # of a head go through them at once.
    assert found.weights == found.passes == 64 * 2 * 8 * (4 + 4)


def test_prefill_by_hand() -> None:
    """A prompt of 2048: tiles of 256 tokens, and blocks of 64 that leave out the chunks after them."""
    sizes = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 2048, 256)
    assert (sizes.tile, sizes.blocks, sizes.chunk) == (256, (16, 64), 512)
    found = count(sizes, [(0, 2048)])
    assert found.cache_read == sum(256 * tile for tile in range(1, 9)) * 4096
    products = 8 * sum(range(1, 5))  # blocks of 64 in 512 tokens, with 1 to 4 chunks of 512
    assert found.weights == products * 8 * (4 + 4)
    assert found.passes == found.weights * 32  # 256 rows, 8 at a time
    exact = 4 * 32 * 128 * 2048 * 2049 / 2  # two products of each query and key it sees
    assert exact < found.flops < 1.26 * exact


def test_a_draft_is_one_small_block() -> None:
    sizes = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 64, 256)
    found = count(sizes, [(500, 5)])
    assert found.weights == 8 * (4 + 4)
    assert found.passes == found.weights * 16 * 4 // 8


def test_a_window_is_all_that_is_read() -> None:
    sizes = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 64, 256)
    found = count(sizes, [(4000, 1)], window=512)
    assert found.cache_read == 33 * 16 * 4096  # positions 3489 to 4000 are in 33 pages
    assert found.weights == 2 * 8 * 8


def test_the_compiler_is_told_of_full_batches() -> None:
    sizes = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 64, 256)
    assert tpu_cost.largest(sizes, 64, 64, 256) == count(sizes, [(4095, 1)] * 64)
    prompts = Sizes.choose(LLAMA_8B, 4, 16, "bfloat16", 2048, 64)
    assert tpu_cost.largest(prompts, 2048, 64, 64) == count(prompts, [(0, 1024)] * 2)
    assert tpu_cost.largest(prompts, 1536, 64, 64) == count(prompts, [(0, 1024), (0, 512)])


def test_committed_counts_are_those_of_the_code() -> None:
    import sys

    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    try:
        import tpu_kernels
    finally:
        sys.path.pop(0)
    lines = (root / "benchmarks/results/tpu-kernels.jsonl").read_text().splitlines()
    committed = [json.loads(line) for line in lines]
    assert committed == list(tpu_kernels.compare())
    for line in committed:
        assert line["noria"]["bytes"] < line["shipped"]["bytes"]
        assert line["noria"]["mxu_passes"] < line["shipped"]["mxu_passes"]
        if line["batch"].startswith("decode"):
            assert line["noria"]["of_least"] < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("window", [24, FULL_ATTENTION])
def test_the_kernel_copies_what_is_counted(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with every copy that it starts noted."""
    import interpreted_pallas

    copied: list[int] = []
    make = pltpu.make_async_copy

    class Noted:
        def __init__(self, source: Any, target: Any, semaphore: Any) -> None:
            self.copy = make(source, target, semaphore)
            self.size = math.prod(target.shape) * np.dtype(target.dtype).itemsize

        def start(self) -> None:
            jax.debug.callback(lambda: copied.append(self.size))
            self.copy.start()

        def wait(self) -> None:
            self.copy.wait()

    def op(*arguments: Any, **options: Any) -> Any:
        return interpreted_pallas.ragged_paged_attention(*arguments, **options)

    monkeypatch.setattr(pltpu, "make_async_copy", Noted)
    monkeypatch.setattr(tpu_sizes, "_CHUNK", 128)
    monkeypatch.setattr(tpu_sizes, "_ROWS", 96)
    world = World([200, 60, 133])
    world.cache = jax.tree.map(np.zeros_like, world.cache)
    world.run(op, [(0, 199, 200), (1, 0, 60), (2, 100, 133)], num_tokens=128, num_rows=4, layer=address(window))
    jax.effects_barrier()
    sizes = Sizes.choose(Lines(2, 32, "float32"), 3, 16, "float32", 128, 14)
    found: Count = count(sizes, [(199, 1), (0, 60), (100, 33)], window)
    assert sum(copied) == found.bytes - found.cache_written  # a copy from HBM to HBM is noted once
