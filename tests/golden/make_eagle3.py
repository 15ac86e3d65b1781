"""Make the golden EAGLE-3 heads: a tiny random Llama, two heads for it, and what an independent reference drafts.

    pip install torch transformers numpy safetensors
    python tests/golden/make_eagle3.py tests/golden/eagle3

The reference is this file: the definition of the head (Li et al. 2025, "EAGLE-3") written down with torch for whole
sequences, without a cache, on top of the hidden states that transformers yields. A seed is accepted only if the drafts
vary and no choice is a near-tie.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

NEW_TOKENS, NUM_DRAFTS = 24, 5
MIN_GAP = 1e-3  # between the two best logits, of the model and of the head
PROMPT_LENGTHS = {"short": 5, "medium": 21, "long": 40}
EPSILON = 0.02  # of the head's norms: large enough to be seen
TARGET: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # other than the model's, as is the size of its heads
    "head_dim": 12,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPSILON,
    "rope_theta": 5000.0,
    "vocab_size": 160,
    "draft_vocab_size": 96,
    "torch_dtype": "float32",
}
# Of a head: its changes, and the numbers of layers behind which it takes the model's states.
HEADS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "head": ({}, (2, 3, 4)),  # 2, half of 7, and all but 3: what a config without a list means
    "head-full": (
        {"draft_vocab_size": 160, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
        (1, 4, 6),
    ),
}


def make_target(seed: int) -> Any:
    config = AutoConfig.for_model("llama", **TARGET)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model


def make_head(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    size, mlp, draft = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (mlp, size),
        "midlayer.mlp.up_proj.weight": (mlp, size),
        "midlayer.mlp.down_proj.weight": (size, mlp),
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
    }
    rng = np.random.default_rng(seed)
    noise = lambda shape: rng.standard_normal(shape, np.float32)
    tensors = {
        name: 1 + 0.3 * noise(shape) if len(shape) == 1 else 0.25 * noise(shape) for name, shape in shapes.items()
    }
    if draft < config["vocab_size"]:
        chosen = np.sort(rng.permutation(config["vocab_size"])[:draft])
        tensors["d2t"] = (chosen - np.arange(draft)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), chosen)
    return tensors


class Reference:
    """The head, for whole sequences."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray], states: tuple[int, ...], target: Any):
        self.config, self.states, self.target = config, states, target
        self.weights = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    def fused(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, E]. hidden_states[n] of transformers is what comes out of n layers."""
        with torch.no_grad():
            all_states = self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([all_states[n][0] for n in self.states], dim=-1) @ self.weights["fc.weight"].T

    def layer(self, token_ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """token_ids: those behind the positions of hidden [n, E]. -> [n, E]."""
        w = lambda name: self.weights[f"midlayer.{name}.weight"]
        embedded = self.target.get_input_embeddings().weight[torch.tensor(token_ids)].detach()
        x = torch.cat([norm(embedded, w("input_layernorm")), norm(hidden, w("hidden_norm"))], dim=-1)
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        groups = heads // self.config["num_key_value_heads"]
        q, k, v = (split(x @ w(f"self_attn.{name}_proj").T, size) for name in "qkv")  # [heads, n, size]
        q, k = (rotate(y, self.config["rope_theta"]) for y in (q, k))
        k, v = (y.repeat_interleave(groups, dim=0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(ahead, -torch.inf), dim=-1) @ v
        x = hidden + out.transpose(0, 1).reshape(len(hidden), -1) @ w("self_attn.o_proj").T
        y = norm(x, w("post_attention_layernorm"))
        gate, up = (y @ w(f"mlp.{name}_proj").T for name in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ w("mlp.down_proj").T

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return norm(hidden, self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T

    def token(self, draft: int) -> int:
        return draft + int(self.weights["d2t"][draft]) if "d2t" in self.weights else draft

    def drafts(self, token_ids: list[int]) -> tuple[list[int], list[float], np.ndarray]:
        """What follows token_ids, of which the model has not seen the last: drafts, gaps, logits of the first."""
        behind, hidden = token_ids[1:], self.fused(token_ids[:-1])
        drafts, gaps, first = [], [], None
        for _ in range(NUM_DRAFTS):
            out = self.layer(behind, hidden)
            logits = self.logits(out)
            first = logits if first is None else first
            second, best = np.argsort(logits[-1].numpy())[-2:]
            gaps.append(float(logits[-1, best] - logits[-1, second]))
            drafts.append(self.token(int(best)))
            behind, hidden = [*behind, drafts[-1]], torch.cat([hidden, out[-1:]])
        return drafts, gaps, first.numpy()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * weight


def split(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(len(x), -1, size).transpose(0, 1)


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """x [heads, n, size]; the pairs are (i, i + size / 2)."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(0, size, 2) / size)
    first, second = x.chunk(2, dim=-1)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def greedy(target: Any, prompt: list[int]) -> tuple[list[int], float]:
    token_ids, gap = list(prompt), np.inf
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            last = target(torch.tensor([token_ids])).logits[0, -1].numpy()
        second, best = np.argsort(last)[-2:]
        gap = min(gap, float(last[best] - last[second]))
        token_ids.append(int(best))
    return token_ids[len(prompt) :], gap


def prompts_of(target: Any, seed: int) -> list[dict[str, Any]] | str:
    rng, prompts = np.random.default_rng(seed), []
    for name, length in PROMPT_LENGTHS.items():
        token_ids = [1, *rng.integers(3, TARGET["vocab_size"], length - 1).tolist()]
        continuation, gap = greedy(target, token_ids)
        if gap < MIN_GAP:
            return f"gap {gap:.1e} of the model in {name}"
        if len(set(continuation)) < 5:
            return f"a monotonous continuation of {name}"
        prompts.append({"name": name, "token_ids": token_ids, "continuation": continuation})
    return prompts


def golden_of(reference: Reference, prompts: list[dict[str, Any]]) -> tuple[dict[str, Any], np.ndarray] | str:
    values, kept = {}, None
    for prompt in prompts:
        drafts = []
        for count in range(1, NEW_TOKENS):
            found, gaps, logits = reference.drafts([*prompt["token_ids"], *prompt["continuation"][:count]])
            if min(gaps) < MIN_GAP:
                return f"gap {min(gaps):.1e} of the head in {prompt['name']}"
            drafts.append(found)
            kept = logits
        if len({tuple(each) for each in drafts}) < NEW_TOKENS // 2:
            return "monotonous drafts"
        values[prompt["name"]] = drafts
    assert kept is not None
    return {"drafts": values}, kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for seed in range(200):
        target = make_target(seed)
        prompts = prompts_of(target, seed)
        if isinstance(prompts, str):
            print(seed, prompts, flush=True)
            continue
        break
    else:
        raise SystemExit("no seed is fit")
    target.save_pretrained(out / "target")
    (out / "target" / "golden.json").write_text(json.dumps({"seed": seed, "prompts": prompts}))
    for name, (changes, states) in HEADS.items():
        for head_seed in range(200):
            tensors = make_head(HEAD | changes, head_seed)
            golden = golden_of(Reference(HEAD | changes, tensors, states, target), prompts)
            if not isinstance(golden, str):
                break
            print(name, head_seed, golden, flush=True)
        else:
            raise SystemExit("no seed is fit")
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(HEAD | changes, indent=2))
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
        (folder / "golden.json").write_text(json.dumps({"seed": head_seed, **golden[0]}))
        np.savez_compressed(folder / "golden.npz", logits=golden[1])  # of the longest prompt's last call
        print(name, head_seed, "saved", flush=True)


if __name__ == "__main__":
    main()
