"""EAGLE-3 heads against values of a reference of their own; see make_eagle3.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria import LLM, SamplingParams
from noria.models.eagle3 import Eagle3Head, build_head
from noria.models.registry import build_model
from noria.ops.backends import Ops
from noria.ops.ragged_paged_attention.api import FULL_ATTENTION, KVCache, LayerAddress, RaggedBatch
from noria.spec.proposer import DraftLength, DraftRequest, Proposer
from noria.weights.checkpoint import open_checkpoint
from noria.weights.load import load_weights, place_on

FOLDER = Path(__file__).parent / "eagle3"
HEADS = ("head", "head-full")
TOLERANCE = 2e-4


def golden(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "golden.json").read_text())


def load(name: str, build: Any) -> tuple[Any, Any]:
    with open_checkpoint(FOLDER / name) as checkpoint:
        model = build(checkpoint.config)
        place = place_on(jax.devices()[0])
        return model, load_weights(checkpoint, model.declaration(), "float32", place)


def one_request(count: int) -> RaggedBatch:
    """All in one block, from the beginning."""
    arrays = (np.zeros(count), np.arange(count), [0, count], [count], [[[1]]], [0, 0, 1])
    return RaggedBatch(*(jnp.asarray(array, jnp.int32) for array in arrays))


def cache_for(layers: int, kv_heads: int, head_dim: int, count: int) -> KVCache:
    spec = KVCache.abstract(2 * layers, count, kv_heads, head_dim, "float32")
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_all_positions(name: str) -> None:
    model, weights = load("target", build_model)
    head, own = load(name, lambda config: build_head(config, model.config))
    assert isinstance(head, Eagle3Head)
    prompt = golden("target")["prompts"][-1]
    ids = np.array([*prompt["token_ids"], *prompt["continuation"][:-1]])
    expected = np.load(FOLDER / name / "golden.npz")["logits"]
    count, c, ops = len(ids) - 1, model.config, Ops.choose("xla", "xla", "cpu")
    batch = one_request(count)
    layers = jnp.arange(c.num_layers, dtype=jnp.int32)
    addresses = LayerAddress(jnp.zeros_like(layers), 2 * layers, jnp.full_like(layers, FULL_ATTENTION))

    @jax.jit
    def logits(weights: Any, own: Any) -> jax.Array:
        cache = cache_for(c.num_layers, c.num_kv_heads, c.head_dim, count)
        known = jnp.asarray(ids[:-1])
        *_, states = model.forward_with_states(weights, cache, known, batch, addresses, ops, head.config.states)
        assert states is not None
        fused = head.fuse(own, states, jnp.int32(count), ops)
        embedded = ops.linear.embed(weights.embedding, jnp.asarray(ids[1:]), fused.dtype)
        layer = head.config.layer
        cache = cache_for(1, layer.num_kv_heads, layer.head_dim, count)
        address = LayerAddress(jnp.int32(0), jnp.int32(0), jnp.int32(FULL_ATTENTION))
        hidden, _ = head.forward(own, cache, embedded, fused, batch, address, ops)
        return head.logits(own, hidden, jnp.int32(count), c.vocab_size, ops)

    found = np.asarray(logits(weights, own))
    tokens = np.arange(expected.shape[1]) + (0 if own.offsets is None else np.asarray(own.offsets))
    np.testing.assert_allclose(found[:, tokens], expected, atol=TOLERANCE, rtol=0)
    others = np.setdiff1d(np.arange(c.vocab_size), tokens)
    assert np.isneginf(found[:, others]).all()


class Listening:
    """Another proposer, and what it proposed."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.drafts: dict[tuple[int, ...], list[int]] = {}  # by the tokens known

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = self._proposer.propose(requests)
        self.drafts |= {tuple(request.token_ids): drafts for request, drafts in zip(requests, found)}
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_an_engine(name: str, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of three answers, of requests that are computed in chunks, side by side."""
    monkeypatch.setattr(DraftLength, "observe", lambda *_: None)  # as many as ever
    monkeypatch.setattr(DraftLength, "wanted", lambda self, num_tokens: self.most)
    prompts, expected = golden("target")["prompts"], golden(name)["drafts"]
    speculation = {"method": "eagle3", "model": str(FOLDER / name), "num_speculative_tokens": 5}
    options = {"max_model_len": 80, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
    with LLM(
        str(FOLDER / "target"), skip_tokenizer_init=True, dtype="float32", compile_cache_dir=compile_cache_dir,
        speculative_config=speculation, **options,
    ) as llm:  # fmt: skip
        proposer = llm.engine.core.speculation._proposer
        assert proposer is not None
        llm.engine.core.speculation._proposer = heard = Listening(proposer)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        results = llm.generate([prompt["token_ids"] for prompt in prompts], params)
    compared = 0
    for prompt, result in zip(prompts, results):
        assert result.outputs[0].token_ids == prompt["continuation"]
        for count, drafts in enumerate(expected[prompt["name"]], start=1):
            found = heard.drafts.get((*prompt["token_ids"], *prompt["continuation"][:count]), [])
            assert found == drafts[: len(found)]
            compared += len(found)
    assert compared > 250
