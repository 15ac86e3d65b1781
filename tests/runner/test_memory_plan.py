"""The memory plan, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from noria.cache.layout import plan_layout
from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.engine.startup import start
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.nn.rope import Rope
from noria.ops.ragged_paged_attention.cpu import scratch_bytes
from noria.runner.memory import MemoryPlan, activation_bytes, available_bytes, plan_memory

MiB = 2**20
MODELS = Path(__file__).parent.parent / "golden" / "models"
MODEL = DecoderConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    norm_epsilon=1e-6,
    tie_word_embeddings=True,
    ropes=(Rope((1.0,) * 8),),
    layer_rope=(0,) * 6,
    windows=(None,) * 6,
    attention_scale=0.25,
)
# One block: 16 tokens * 2 heads * (key + value) * 16 numbers * 4 bytes * 6 layers
BLOCK_BYTES = 16 * 2 * 2 * 16 * 4 * 6
# One request of 1024 tokens: 64 blocks
SIZES = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 128}


def resolve(**options: Any) -> ResolvedConfig:
    limits = ModelLimits(MODEL.max_position_embeddings, MODEL.vocab_size)
    return EngineConfig(model="m", **SIZES | options).resolve(limits, "cpu")


def plan(
    available: int = 64 * MiB,
    on_cpu: bool = False,
    cache_dtype: str = "float32",
    model: DecoderConfig = MODEL,
    **options,
) -> MemoryPlan:
    return plan_memory(
        resolve(**options),
        model,
        plan_layout(model.windows),
        available=available,
        weights=5 * MiB,
        activation_dtype_bytes=4,
        cache_dtype=cache_dtype,
        on_cpu=on_cpu,
    )


def test_what_weights_and_the_largest_step_leave_is_the_cache() -> None:
    result = plan()
    assert result.block_bytes == BLOCK_BYTES == 24576
    assert result.weights == 5 * MiB
    assert result.num_blocks == (64 * MiB - 5 * MiB - result.activations) // BLOCK_BYTES
    assert result.cache == result.num_blocks * BLOCK_BYTES
    assert result.weights + result.activations + result.cache <= result.available
    assert result.weights + result.activations + result.cache + BLOCK_BYTES > result.available
    assert result.max_concurrency == (result.num_blocks - 1) / 64  # the null block belongs to nobody


@pytest.mark.parametrize(
    ("cache_dtype", "bytes_per_head"),
    [("float32", 64), ("bfloat16", 32), ("float16", 32), ("fp8_e4m3", 16), ("fp8_e5m2", 16), ("int8", 16 + 4)],
)
def test_bytes_of_a_block(cache_dtype: str, bytes_per_head: int) -> None:
    """int8 has a float32 scale for each token and head of 16 numbers."""
    assert plan(cache_dtype=cache_dtype).block_bytes == 16 * 2 * 2 * 6 * bytes_per_head
    assert plan(cache_dtype=cache_dtype, block_size=32).block_bytes == 32 * 2 * 2 * 6 * bytes_per_head


def test_sliding_layers_need_fewer_blocks() -> None:
    """5 layers with a window of 64 tokens in groups of one slot beside the full one: a block is one layer's."""
    windows = (64, 64, 64, 64, 64, None)
    result = plan(model=dataclasses.replace(MODEL, windows=windows))
    assert result.block_bytes == BLOCK_BYTES // 6
    # full: 1024 / 16 = 64 blocks; sliding: 63 before a chunk of 128, begun anywhere in a block: ceil(206 / 16) = 13
    assert result.max_concurrency == (result.num_blocks - 1) / (64 + 5 * 13)


def test_kv_cache_memory_bytes_limits_the_pool() -> None:
    assert plan(kv_cache_memory_bytes=10 * MiB).num_blocks == 10 * MiB // BLOCK_BYTES
    assert plan(kv_cache_memory_bytes=1000 * MiB).num_blocks == plan().num_blocks


def test_a_cpu_keeps_most_memory_for_its_user() -> None:
    """1 GiB of cache unless one request needs more."""
    lots = 100_000 * MiB
    assert plan(lots, on_cpu=True).num_blocks == 1024 * MiB // BLOCK_BYTES
    assert plan(lots, on_cpu=True, kv_cache_memory_bytes=2048 * MiB).num_blocks == 2048 * MiB // BLOCK_BYTES
    wide = dataclasses.replace(MODEL, head_dim=16 * 1024)  # 24 MiB a block
    assert plan(lots, on_cpu=True, model=wide).num_blocks == 64 + 1
    assert plan(lots, on_cpu=False).num_blocks > 1024 * MiB // BLOCK_BYTES


def test_num_blocks_override_is_taken_as_it_is() -> None:
    assert plan(num_blocks_override=70).num_blocks == 70
    assert plan(num_blocks_override=65).max_concurrency == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_blocks_override": 64},
            r"64 blocks.*\(1024\) .* 65 \(2 MiB\); lower max_model_len to 1008 or raise num_blocks_over.* to 65",
        ),
        (
            {"kv_cache_memory_bytes": MiB},
            r"would have 42 blocks.*lower max_model_len to 656 or raise kv_cache_memory_bytes to 1597440",
        ),
        (
            {"kv_cache_memory_bytes": 1},
            r"would have 0 blocks.*needs 65 \(2 MiB\); raise kv_cache_memory_bytes to 1597440",
        ),
        (
            {"available": 8 * MiB},
            r"would have \d+ blocks.*; of 8 MiB weights take 5 MiB, .* max_model_len to \d+, or lower max_num_seqs",
        ),
        (
            {"available": 7 * MiB},
            r"of 7 MiB weights take 5 MiB, the largest step \d MiB; lower max_num_seqs or max_num_batched_tokens",
        ),
        ({"available": 1 * MiB}, r"would have 0 blocks.*; use more devices \(tensor_parallel_size\) or fewer bits"),
        ({"num_blocks_override": 3000}, r"num_blocks_override \(3000\) does not fit, lower it"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_with_the_option_to_change(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"available": 15 * MiB // 2}, {"kv_cache_memory_bytes": MiB}, {"num_blocks_override": 20}]
)
@pytest.mark.parametrize("windows", [(None,) * 6, (64, 64, 64, 64, 64, None)])
def test_who_follows_the_advice_can_start(options: dict, windows: tuple[int | None, ...]) -> None:
    model = dataclasses.replace(MODEL, windows=windows)
    with pytest.raises(ConfigError, match="lower max_model_len to") as caught:
        plan(model=model, **options, max_model_len=4096)
    [longest] = re.findall(r"lower max_model_len to (\d+)", str(caught.value))
    plan(model=model, **options, max_model_len=int(longest))
    with pytest.raises(ConfigError):
        plan(model=model, **options, max_model_len=int(longest) + 16)


def test_more_memory_utilization_is_advised_where_it_helps() -> None:
    with pytest.raises(ConfigError, match="raise memory_utilization"):
        plan(5 * MiB, memory_utilization=0.5)


def test_the_refusal_comes_before_anything_is_compiled(compile_cache_dir: str) -> None:
    options = {"skip_tokenizer_init": True, "compile_cache_dir": compile_cache_dir, "num_blocks_override": 3}
    with pytest.raises(ConfigError, match="raise num_blocks_override"):
        start(EngineConfig.from_options(model=str(MODELS / "llama"), max_num_seqs=2, max_model_len=64, **options))


def test_the_plan_reads_well() -> None:
    result = MemoryPlan(2048 * MiB, 1000 * MiB, 24 * MiB, MiB, 1001, 15.625)
    text = "weights 1,000 MiB, largest step 24 MiB, KV cache 1,001 MiB (1,001 blocks, 15.6 requests of max_model_len)"
    assert text in str(result)
    assert "2,048 MiB" in str(result)


def test_the_larger_the_step_the_larger_the_estimate() -> None:
    small, more_tokens = resolve(), resolve(max_num_batched_tokens=512)
    more_rows = resolve(max_num_seqs=64)
    assert activation_bytes(small, MODEL, 4) < activation_bytes(more_tokens, MODEL, 4)
    # logits alone are 4 bytes for each row and token of the vocabulary
    growth = activation_bytes(more_rows, MODEL, 4) - activation_bytes(small, MODEL, 4)
    assert growth >= 60 * 1000 * 4


def test_the_scratch_of_native_attention_is_as_large_as_its_source_says() -> None:
    """scratch_floats of native/attention/types.h for 96 queries of 64: two states, and what one tile needs."""
    state = 96 * 17 + 96 * 64
    assert scratch_bytes(64) == 4 * (2 * state + 2 * 96 + 96 * (64 + 64) + (2 * 64 + 16) * 64)
    assert scratch_bytes(50) == scratch_bytes(64)
    assert activation_bytes(resolve(), dataclasses.replace(MODEL, head_dim=4096), 4) > scratch_bytes(4096)


def test_available_memory_of_a_cpu_is_what_the_system_can_give() -> None:
    import jax

    available = available_bytes(jax.devices("cpu")[:1])
    assert 16 * MiB < available < 2**50


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"max_num_batched_tokens": 33}),
        pytest.param("gemma3", {"max_num_seqs": 32, "max_num_batched_tokens": 32}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"max_num_batched_tokens": 128}, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", {"max_num_batched_tokens": 128}, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_covers_what_the_compiler_reserves(name: str, options: dict, compile_cache_dir: str) -> None:
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "dtype": "float32"} | options
    sizes["attention_backend"] = "xla"  # what the native one holds, no compiler knows
    config = EngineConfig.from_options(
        model=str(MODELS / name), skip_tokenizer_init=True, compile_cache_dir=compile_cache_dir, **sizes
    )
    engine = start(config)
    runner = engine.core.runner
    try:
        analyses = {key: program.memory_analysis() for key, program in runner._programs._compiled.items()}
        if None in analyses.values():
            pytest.skip("this backend does not tell")
        reserved = max(analysis.temp_size_in_bytes for analysis in analyses.values())
        assert 0 < reserved <= engine.report.memory.activations < 20 * reserved
    finally:
        runner.close()
