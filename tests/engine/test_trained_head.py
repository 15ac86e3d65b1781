"""A draft head that is trained: on a tiny model with a structure, it comes to guess right where n-grams cannot.

The model is made so that after each token one other is likely, and a long time passes before anything comes up again;
its layers, which are random, see to exceptions. The head learns from sequences that the model wrote, as EAGLE-3 is
trained: it is run several steps ahead, from the second on with its own output in place of the model's states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import CONFIG, random_tensors, save_head
from engine_checks import check_idle
from safetensors.numpy import save_file

from noria import LLM, SamplingParams

VOCAB, SPOKEN, SIZE, MLP, LAYERS, HEADS, KV, DIM = 256, 180, 64, 96, 3, 4, 2, 16
LENGTH, STEPS, BATCH, AHEAD = 56, 500, 16, 3
Tensors = dict[str, Any]
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
HEAD = CONFIG | {
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": SPOKEN + 12,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def make_target(folder: Path) -> Tensors:
    rng = np.random.default_rng(0)
    noise = lambda *shape: rng.standard_normal(shape, np.float32)
    embedding = noise(VOCAB, SIZE)
    cycle = rng.permutation(SPOKEN)
    head = 0.02 * noise(VOCAB, SIZE)
    head[np.roll(cycle, -1)] = 0.4 * embedding[cycle]  # after each of the cycle the next
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": np.ones(SIZE)}
    for layer in range(LAYERS):
        sizes = {"q_proj": (HEADS * DIM, SIZE), "k_proj": (KV * DIM, SIZE), "v_proj": (KV * DIM, SIZE)}
        matrices = {f"self_attn.{name}": noise(*shape) / 8 for name, shape in sizes.items()}
        matrices["self_attn.o_proj"] = 1.0 * noise(SIZE, HEADS * DIM) / 8
        matrices |= {f"mlp.{name}": noise(MLP, SIZE) / 8 for name in ("gate_proj", "up_proj")}
        matrices["mlp.down_proj"] = 1.25 * noise(SIZE, MLP) / 8
        norms = {name: np.ones(SIZE) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, tensor in (matrices | norms).items():
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    tensors = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def rotate(x: jax.Array) -> jax.Array:
    """[B, T, heads, DIM]"""
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(x: jax.Array, inner: jax.Array, w: Any) -> jax.Array:
    """A decoder layer of whole sequences: x [B, T, SIZE], and what attention takes in its place; w: weights by name."""
    q, k, v = (
        (inner @ w(f"self_attn.{name}_proj").T).reshape(*x.shape[:2], -1, DIM) for name in ("q", "k", "v")
    )  # fmt: skip
    q, k = rotate(q), rotate(k)
    k, v = (jnp.repeat(y, HEADS // KV, axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1) @ w("self_attn.o_proj").T
    y = norm(x, w("post_attention_layernorm"))
    return x + (jax.nn.silu(y @ w("mlp.gate_proj").T) * (y @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T


@jax.jit
def states_of(tensors: Tensors, token_ids: jax.Array) -> jax.Array:
    """[B, T] -> [B, T, 3 * SIZE]: behind all layers of the model."""
    x, states = tensors["model.embed_tokens.weight"][token_ids], []
    for index in range(LAYERS):
        w = lambda name, index=index: tensors[f"model.layers.{index}.{name}.weight"]
        x = layer(x, norm(x, w("input_layernorm")), w)
        states.append(x)
    return jnp.concatenate(states, axis=-1)


def loss(head: Tensors, embedding: jax.Array, states: jax.Array, token_ids: jax.Array, drafted: jax.Array) -> jax.Array:
    """drafted [VOCAB]: place of a token in the draft vocabulary, -1 for those that are not in it."""
    w = lambda name: head[f"midlayer.{name}.weight"]
    hidden, total = states @ head["fc.weight"].T, jnp.float32(0)
    for ahead in range(AHEAD):
        # At position p: the hidden state there, the token at p + 1; what is guessed is the token at p + 2.
        embedded = embedding[token_ids[:, 1 + ahead : LENGTH - 1]]
        hidden = hidden[:, : embedded.shape[1]]
        inner = jnp.concatenate([norm(embedded, w("input_layernorm")), norm(hidden, w("hidden_norm"))], axis=-1)
        hidden = layer(hidden, inner, w)
        logits = norm(hidden, head["norm.weight"]) @ head["lm_head.weight"].T
        places = drafted[token_ids[:, 2 + ahead :]]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(places, 0)[..., None], axis=-1)[..., 0]
        total -= jnp.sum(jnp.where(places >= 0, chosen, 0)) / jnp.sum(places >= 0)
    return total / AHEAD


def trained(target: Tensors, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """By Adam (Kingma & Ba 2015)."""
    head = random_tensors(HEAD)
    head["d2t"], head["t2d"] = np.zeros(HEAD["draft_vocab_size"], np.int64), np.arange(VOCAB) < len(head["d2t"])
    fixed = {name: head.pop(name) for name in ("d2t", "t2d")}
    size = len(fixed["d2t"])
    drafted = jnp.where(jnp.arange(VOCAB) < size, jnp.arange(VOCAB), -1)
    embedding = jnp.asarray(target["model.embed_tokens.weight"])

    @jax.jit
    def update(head: Tensors, first: Tensors, second: Tensors, step: jax.Array, batch: jax.Array) -> Any:
        value, slopes = jax.value_and_grad(loss)(head, embedding, states_of(target, batch), batch, drafted)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, slopes)
        rate = 3e-3 * (1 - step / STEPS)
        move = lambda p, m, v: p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)
        return jax.tree.map(move, head, first, second), first, second, value

    zeros = jax.tree.map(jnp.zeros_like, head)
    first, second, rng, values = zeros, zeros, np.random.default_rng(1), []
    for step in range(1, STEPS + 1):
        batch = jnp.asarray(token_ids[rng.integers(len(token_ids), size=BATCH)])
        head, first, second, value = update(head, first, second, jnp.float32(step), batch)
        values.append(float(value))
    assert np.mean(values[-20:]) < 0.6 * values[0]
    return {name: np.asarray(tensor) for name, tensor in head.items()} | fixed


@pytest.mark.slow
def test_a_trained_head_guesses_better_than_ngrams(tmp_path: Path, compile_cache_dir: str) -> None:
    target = make_target(tmp_path / "target")
    options: dict[str, Any] = {
        "model": str(tmp_path / "target"), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": LENGTH + 8,
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "compile_cache_dir": compile_cache_dir,
    }  # fmt: skip
    rng = np.random.default_rng(2)
    starts = [rng.integers(SPOKEN, size=4).tolist() for _ in range(432)]
    params = SamplingParams(temperature=0, max_tokens=LENGTH - 4, ignore_eos=True)
    with LLM(**options) as llm:
        written = [result.outputs[0].token_ids for result in llm.generate(starts, params)]
    sequences = np.array([start + answer for start, answer in zip(starts, written)])
    # It has a structure, and exceptions: what follows a token is not always the same.
    followers = [len({*sequences[:, 5:][sequences[:, 4:-1] == token].tolist()}) for token in range(SPOKEN)]
    assert np.mean(np.array(followers) > 1) > 0.3
    head = save_head(tmp_path / "head", HEAD, trained(target, sequences[:400]))
    lengths, rates = {}, {}
    for speculation in (
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2},
    ):
        with LLM(**options, speculative_config=speculation) as llm:
            found = [result.outputs[0].token_ids for result in llm.generate(starts[400:], params)]
            assert found == written[400:]
            stats = llm.stats.speculation
            check_idle(llm)
        name = speculation["method"]
        lengths[name], rates[name] = stats.mean_acceptance_length, stats.num_accepted_tokens / (32 * (LENGTH - 4))
    assert lengths["eagle3"] > 2
    # Of all tokens, those that came as drafts.
    assert rates["eagle3"] > 0.4
    assert rates["eagle3"] > 2 * rates["ngram"], rates
