"""Every family against the golden values: logits of a forward pass made by hand, tokens of the whole engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ModelCase, model_cases

from noria import LLM, SamplingParams
from noria.cache.layout import CacheLayout, plan_layout
from noria.models.decoder import Decoder
from noria.models.registry import build_model
from noria.ops import native
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import BACKENDS, FULL_ATTENTION, KVCache, LayerAddress, RaggedBatch
from noria.runner.capture import use_compile_cache
from noria.weights.checkpoint import open_checkpoint
from noria.weights.load import load_weights, place_on

BLOCK_SIZE = 8
BLOCKS_PER_ROW = 8  # 64 tokens: the longest prompt has 60
ROWS = 4  # two prompts, two rows of padding
CASES = {case.name: case for case in model_cases()}
# The xla back end takes long to compile. By default one model of each family shows what it makes of the logits; the
# engine runs it on all of them in any case.
XLA_BY_DEFAULT = ("llama", "qwen2-untied-window", "qwen3", "gemma3")


def load(case: ModelCase, dtype: str = "float32") -> tuple[Decoder, Any]:
    with open_checkpoint(case.folder) as checkpoint:
        model = build_model(checkpoint.config)
        return model, load_weights(checkpoint, model.declaration(), dtype, place_on(jax.devices()[0]))


def block_tables(layout: CacheLayout) -> np.ndarray:
    """[groups, ROWS, BLOCKS_PER_ROW]: every row its own blocks in every group, in no order; block 0 is nobody's."""
    count = layout.num_groups * ROWS * BLOCKS_PER_ROW
    blocks = np.random.default_rng(0).permutation(np.arange(1, count + 1))
    return blocks.reshape(layout.num_groups, ROWS, BLOCKS_PER_ROW).astype(np.int32)


def ragged(tables: np.ndarray, spans: list[tuple[int, int]], num_tokens: int) -> RaggedBatch:
    """A step that computes positions start to stop - 1 of each row."""
    counts = [stop - start for start, stop in spans]
    total = sum(counts)
    starts = np.full(ROWS + 1, total)
    starts[: len(spans) + 1] = np.concatenate([[0], np.cumsum(counts)])
    token_rows, positions, seq_lens = np.full(num_tokens, ROWS), np.zeros(num_tokens, int), np.zeros(ROWS, int)
    token_rows[:total] = np.repeat(np.arange(len(spans)), counts)
    positions[:total] = np.concatenate([np.arange(*span) for span in spans])
    seq_lens[: len(spans)] = [stop for _, stop in spans]
    arrays = (token_rows, positions, starts, seq_lens, tables, np.array([0, 0, len(spans)]))
    return RaggedBatch(*(jnp.asarray(array, jnp.int32) for array in arrays))


def all_logits(case: ModelCase, backend: str, dtype: str = "float32", cache_dtype: str = "float32") -> list[np.ndarray]:
    """Logits [tokens, vocab] of the prompts whose values were kept, computed together, in two chunks each."""
    model, weights = load(case, dtype)
    layout, c = plan_layout(model.config.windows), model.config
    tables = block_tables(layout)
    num_blocks = tables.max() + 1
    sizes = (layout.slots * num_blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
    spec = KVCache.abstract(*sizes, cache_dtype, planes=c.cache_planes)
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
    windows = [FULL_ATTENTION if window is None else window for window in c.windows]
    addresses = LayerAddress(
        group=jnp.asarray(layout.layer_group, jnp.int32),
        offset=jnp.asarray(layout.layer_slot, jnp.int32) * num_blocks,
        window=jnp.asarray(windows, jnp.int32),
    )

    ops = Ops.choose(backend, "xla", "cpu")

    @partial(jax.jit, donate_argnums=1)
    def step(weights: Any, cache: KVCache, ids: jax.Array, batch: RaggedBatch) -> tuple[jax.Array, KVCache]:
        hidden, cache = model.forward(weights, cache, ids, batch, addresses, ops)
        return model.logits(weights, hidden, jnp.int32(len(hidden)), ops), cache

    prompts = [np.array(p.token_ids) for p in case.prompts if p.logits is not None]
    cuts = [len(p) // 3 for p in prompts]
    chunks = [[(0, cut) for cut in cuts], [(cut, len(p)) for cut, p in zip(cuts, prompts)]]
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    for spans in chunks:
        ids = np.zeros(48, np.int32)
        used = np.concatenate([p[start:stop] for p, (start, stop) in zip(prompts, spans)])
        ids[: len(used)] = used
        logits, cache = step(weights, cache, jnp.asarray(ids), ragged(tables, spans, len(ids)))
        ends = np.cumsum([stop - start for start, stop in spans])
        for part, rows in zip(parts, np.split(np.asarray(logits), ends)):
            part.append(rows)
    return [np.concatenate(part) for part in parts]


def kept_logits(case: ModelCase) -> list[np.ndarray]:
    return [p.logits for p in case.prompts if p.logits is not None]


def cases_and_backends() -> list:
    slow = lambda case, backend: [pytest.mark.slow] * (backend != "reference" and case.name not in XLA_BY_DEFAULT)
    backends = [name for name, _ in BACKENDS if name != "native" or native.available()]
    pairs = [
        (case, backend)
        for case in model_cases()
        for backend in backends
        if not (backend == "native" and case.name.startswith("deepseek"))  # it does not compute latent attention
    ]
    return [pytest.param(*pair, id="-".join(map(str, pair)), marks=slow(*pair)) for pair in pairs]


@pytest.mark.parametrize(("case", "backend"), cases_and_backends())
def test_logits_of_all_positions(case: ModelCase, backend: str, compile_cache_dir: str):
    use_compile_cache(compile_cache_dir)
    for ours, golden in zip(all_logits(case, backend), kept_logits(case), strict=True):
        np.testing.assert_allclose(ours, golden, rtol=0, atol=2e-4)


def engine(case: ModelCase, compile_cache_dir: str, **options: Any) -> LLM:
    """With a step so small that all but the shortest prompts are computed in chunks, among others that decode."""
    options = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "strict_compile": True,
        "num_blocks_override": 200,
    } | options
    return LLM(
        str(case.folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        compile_cache_dir=compile_cache_dir,
        **options,
    )


def greedy(llm: LLM, case: ModelCase) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    answers = llm.generate([list(p.token_ids) for p in case.prompts], params)
    assert [a.prompt_token_ids for a in answers] == [list(p.token_ids) for p in case.prompts]
    assert llm.stats.compiles_after_warmup == 0
    llm._front.engine.core.scheduler.check_integrity()
    return [tuple(a.outputs[0].token_ids) for a in answers]


@pytest.mark.parametrize("case", model_cases(), ids=str)
def test_greedy_tokens_of_the_engine(case: ModelCase, compile_cache_dir: str):
    with engine(case, compile_cache_dir) as llm:
        assert greedy(llm, case) == [p.continuation.token_ids for p in case.prompts]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def test_greedy_tokens_in_bursts(name: str, compile_cache_dir: str):
    case = CASES[name]
    with engine(case, compile_cache_dir, num_scheduler_steps=8) as llm:
        assert greedy(llm, case) == [p.continuation.token_ids for p in case.prompts]
        assert llm.stats.steps < 20  # one by one they are more than 32


# Root mean square of what a narrower dtype does to the logits, whose standard deviation is 1.5. The lower bounds show
# that the cache really is as narrow as it was asked to be.
CACHE_NOISE = {
    "bfloat16": (1e-3, 0.02),
    "float16": (1e-4, 0.003),
    "fp8_e4m3": (0.03, 0.25),
    "fp8_e5m2": (0.06, 0.5),
    "int8": (0.005, 0.05),
}


@pytest.mark.parametrize("cache_dtype", CACHE_NOISE)
def test_logits_with_each_cache_dtype(cache_dtype: str, compile_cache_dir: str):
    use_compile_cache(compile_cache_dir)
    case = CASES["llama"]
    low, high = CACHE_NOISE[cache_dtype]
    for ours, golden in zip(all_logits(case, "reference", cache_dtype=cache_dtype), kept_logits(case), strict=True):
        assert low < np.sqrt(np.mean((ours - golden) ** 2)) < high


@pytest.mark.parametrize(
    ("name", "dtype", "atol"),
    [("gemma3", "bfloat16", 0.4), ("gemma3", "float16", 0.05)],
)
def test_logits_in_half_precision(name: str, dtype: str, atol: float, compile_cache_dir: str):
    use_compile_cache(compile_cache_dir)
    case = CASES[name]
    for ours, golden in zip(all_logits(case, "reference", dtype, dtype), kept_logits(case), strict=True):
        np.testing.assert_allclose(ours, golden, rtol=0, atol=atol)


def test_latent_attention_in_half_precision(compile_cache_dir: str):
    """Rounding makes a router choose other experts now and then."""
    use_compile_cache(compile_cache_dir)
    case = CASES["deepseek-v3"]
    for ours, golden in zip(all_logits(case, "reference", "bfloat16", "bfloat16"), kept_logits(case), strict=True):
        assert np.mean(np.abs(ours - golden) < 0.4) > 0.97


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("float32", dtype) for dtype in CACHE_NOISE]
    + [("bfloat16", "auto"), pytest.param("float16", "auto", marks=pytest.mark.slow)],
)
def test_engine_with_each_dtype(dtype: str, cache_dtype: str, compile_cache_dir: str):
    """One token after every beginning of every golden continuation: an error at one step does not spoil the next."""
    case = CASES["llama"]
    stored = dtype if cache_dtype == "auto" else cache_dtype
    high = CACHE_NOISE[stored][1] if dtype == "float32" else 0.1
    steps = [
        ([*p.token_ids, *p.continuation.token_ids[:step]], p.continuation.token_ids[step], p.continuation.gaps[step])
        for p in case.prompts
        for step in range(32)
    ]
    with engine(case, compile_cache_dir, dtype=dtype, kv_cache_dtype=cache_dtype) as llm:
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        answers = llm.generate([ids for ids, _, _ in steps], one)
        assert llm.stats.compiles_after_warmup == 0
        element = {"fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1 + 4 / 16}.get(stored, 2)  # bytes; head_dim is 16
        values = 2 * BLOCK_SIZE * 2 * 2 * 16  # 2 layers, 2 KV heads, keys and values
        assert llm.stats.startup.memory.block_bytes == values * element
    wrong = [
        gap for answer, (_, token, gap) in zip(answers, steps, strict=True) if answer.outputs[0].token_ids != [token]
    ]
    # Two logits have to err in opposite ways by more than the gap between them; few do by four standard deviations.
    assert all(gap < 4 * 2**0.5 * high for gap in wrong), wrong
    assert len(wrong) <= 2 + 0.7 * high * len(steps), wrong


def test_windows_save_cache_bytes(compile_cache_dir: str):
    """Gemma 3 (two of three layers see 16 tokens) against a Mistral, all of whose layers are full."""
    held = {}
    for name, case in (("windows", CASES["gemma3"]), ("full", CASES["mistral"])):
        with engine(case, compile_cache_dir) as llm:
            scheduler, peak = llm._front.engine.core.scheduler, 0
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            for part in llm.stream(list(case.prompts[-1].token_ids), params):
                if not part.finished:
                    peak = max(peak, scheduler.stats.cache.num_used)
            scheduler.check_integrity()
            c = llm._front.engine.core.runner.model.config
            per_layer = 4 * BLOCK_SIZE * 2 * c.num_kv_heads * c.head_dim
            memory = llm.stats.startup.memory
            # in units of one layer's block, so that models of different sizes compare
            held[name] = peak * memory.block_bytes / per_layer / c.num_layers
    assert held["full"] == 124 // BLOCK_SIZE + 1
    assert held["windows"] < 0.65 * held["full"]
