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
from noria.ops.ragged_paged_attention.api import FULL_ATTENTION, KVCache, LayerAddress, RaggedBatch, choose
from noria.runner.capture import use_compile_cache
from noria.weights.checkpoint import open_checkpoint
from noria.weights.load import load_weights, place_on

BLOCK_SIZE = 8
BLOCKS_PER_ROW = 8  # 64 tokens: the longest prompt has 60
ROWS = 4  # two prompts, two rows of padding
CASES = {case.name: case for case in model_cases()}


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
    spec = KVCache.abstract(layout.slots * num_blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim, cache_dtype)
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
    windows = [FULL_ATTENTION if window is None else window for window in c.windows]
    addresses = LayerAddress(
        group=jnp.asarray(layout.layer_group, jnp.int32),
        offset=jnp.asarray(layout.layer_slot, jnp.int32) * num_blocks,
        window=jnp.asarray(windows, jnp.int32),
    )

    @partial(jax.jit, donate_argnums=1)
    def step(weights: Any, cache: KVCache, ids: jax.Array, batch: RaggedBatch) -> tuple[jax.Array, KVCache]:
        hidden, cache = model.forward(weights, cache, ids, batch, addresses, choose(backend))
        return model.logits(weights, hidden), cache

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


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("case", model_cases(), ids=str)
def test_logits_of_all_positions(case: ModelCase, backend: str, compile_cache_dir: str):
    use_compile_cache(compile_cache_dir)
    for ours, golden in zip(all_logits(case, backend), kept_logits(case), strict=True):
        np.testing.assert_allclose(ours, golden, rtol=0, atol=2e-4)


def engine(case: ModelCase, compile_cache_dir: str, **options: Any) -> LLM:
    """With a step so small that all but the shortest prompts are computed in chunks, among others that decode."""
    options = {"dtype": "float32", "block_size": BLOCK_SIZE, "strict_compile": True} | options
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
