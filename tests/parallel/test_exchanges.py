"""What devices exchange in a step, counted in the compiled programs: nothing between copies of a model but tokens, and
within one the residual stream, never weights or the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafting import head_config, with_drafts
from test_tensor_parallel import GOLDEN, on_eight_devices

WORKER = Path(__file__).with_name("exchanges_worker.py")
TOKENS, ROWS, HIDDEN, LAYERS = 16, 8, 32, 2  # of the step, and of the model
ENGINES = {
    "data": {"data_parallel_size": 2},
    "attention": {"attention_data_parallel_size": 2, "tensor_parallel_size": 2},
    "all": {"data_parallel_size": 2, "attention_data_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("name", ["attention", pytest.param("all", marks=pytest.mark.slow)])
def test_exchanges(name: str) -> None:
    engines = {each: ENGINES[each] for each in ("data", name)}
    found = on_eight_devices(WORKER, {"model": str(GOLDEN / "llama"), "engines": engines})
    assert found["data"]["forward"] == []
    stream = TOKENS // ENGINES[name].get("data_parallel_size", 1) * HIDDEN * 4
    in_layers = sorted((kind, size) for kind, size, times in found[name]["forward"] if times == LAYERS)
    # Behind attention the sum over the heads of each rank, and the gather of the ranks; behind the MLP one sum.
    assert in_layers == [("all-gather", stream), ("all-reduce", stream // 2), ("all-reduce", stream)]
    assert max(size for _, size, _ in found[name]["forward"]) == stream
    # Tokens, whether anybody draws, and in steps in which somebody does, where stop tokens are to be banned.
    assert sum(size for _, size, _ in found["data"]["sample"]) <= ROWS * 4 + 8 + ROWS * 16 * 2 * 4
    assert max(size for _, size, _ in found[name]["sample"]) <= ROWS * 16 * 2 * 4


@pytest.mark.slow
def test_exchanges_of_what_drafts() -> None:
    """A head that follows the model exchanges nothing between ranks, and its drafts no more than a sampler does; on
    several devices of a rank what one layer does."""
    llama = GOLDEN / "llama"
    head = {"head": head_config(llama), "speculative_config": with_drafts("eagle3", llama)["speculative_config"]}
    engines = {name: {**head, **ENGINES[name]} for name in ("data", "attention")}
    found = on_eight_devices(WORKER, {"model": str(llama), "engines": engines})
    assert sum(size for _, size, _ in found["data"]["follow"]) <= 4  # what the host waits for
    # Tokens, whether anybody draws, and where stop tokens are to be banned: for the first draft and, in a loop, others.
    assert sum(size for _, size, _ in found["data"]["draft"]) <= 3 * ROWS * 4 + 2 * (ROWS * 16 * 2 * 4) + 32
    # The embedded tokens of both ranks, which share the model's vocabulary; of weights and cache every part is larger.
    assert max(size for _, size, _ in found["attention"]["follow"]) <= TOKENS * HIDDEN * 4
