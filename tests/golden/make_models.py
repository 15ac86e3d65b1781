"""Make the tiny golden models: a Hugging Face folder per case, with transformers' own logits and greedy continuations.

    pip install torch transformers numpy safetensors
    python tests/golden/make_models.py tests/golden/models

Each folder holds config.json, the weights, golden.json (prompts, greedy continuations, the logit gap at each step) and
golden.npz (logits of all positions). A seed is accepted only if the values can tell right from wrong and survive
rounding in float32: no near-tie along a continuation, no monotonous continuation, small error under rounding-sized
noise in the weights, and a clear change of the logits for each feature that is switched off or altered (the table
`Family.alter`).
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

NEW_TOKENS = 32
MIN_GAP = 5e-3  # between the two best logits, at every step of every continuation
MIN_DISTINCT = 6  # token ids in a continuation of 32
MAX_NOISE = 2e-5  # change of any logit when every weight is off by one rounding of float32
MIN_EFFECT = 3e-3  # change of some logit when a feature is altered
BASE_STRENGTH = 0.25  # standard deviation of the matrices
PROMPT_LENGTHS = {"short": 5, "medium": 41, "long": 60}
WITH_LOGITS = ("short", "long")


@dataclass(frozen=True)
class Family:
    """A configuration, what its random weights are like, and what must be visible in its logits."""

    name: str
    config: dict[str, Any]
    embedding_strength: float = BASE_STRENGTH  # a tied embedding that outweighs the layers repeats its input for ever
    zero_centered_norm: bool = False  # the norm multiplies by 1 + weight
    dtype: str = "float32"  # of the stored weights; the golden values are float32 computed from these
    alter: dict[str, dict[str, Any]] = field(default_factory=dict)  # feature -> config changes that must show
    variants: tuple[str, ...] = ()  # further folders with the same weights and golden values


BASE = {
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 0.02,  # large enough to be seen
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Of the 8 wavelengths of a head of 16, at 32 positions one is kept, one blended and six divided by the factor.
    "original_max_position_embeddings": 32,
}
MOE = BASE | {
    "model_type": "qwen3_moe",
    "head_dim": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "rope_parameters": DEFAULT_ROPE,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = BASE | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
GEMMA = BASE | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 16,
    "layer_types": ["full_attention" if (layer + 1) % 3 == 0 else "sliding_attention" for layer in range(7)],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
GEMMA_LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA_ALTER = {
    "window": {"sliding_window": 64},
    "layer pattern": {"layer_types": GEMMA["layer_types"][::-1]},
    "attention scale": {"query_pre_attn_scalar": 24},
    "tanh in the activation": {"hidden_activation": "gelu"},
}


def _swapped(rope: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": rope["sliding_attention"], "sliding_attention": rope["full_attention"]}


FAMILIES = (
    Family(
        "llama",
        BASE | {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE},
        alter={"rope base": {"rope_parameters": DEFAULT_ROPE | {"rope_theta": 5000.0}}},
        variants=("llama-sharded",),
    ),
    Family(
        "llama-llama3-rope",
        BASE | {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
        alter={
            "scaling": {"rope_parameters": DEFAULT_ROPE},
            "original positions": {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 128}},
            "low frequency factor": {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
        },
        variants=("llama-llama3-rope-legacy",),
    ),
    Family(
        # A vocabulary that is no multiple of anything, and every head has keys of its own.
        "llama-bias-linear-rope",
        BASE
        | {
            "model_type": "llama",
            "vocab_size": 197,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
        alter={"scaling": {"rope_parameters": DEFAULT_ROPE}},
    ),
    Family(
        "llama-bfloat16",
        BASE | {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE},
        dtype="bfloat16",
    ),
    Family(
        "mistral-window",
        BASE | {"model_type": "mistral", "sliding_window": 16, "rope_parameters": DEFAULT_ROPE},
        alter={"window": {"sliding_window": None}, "window by one": {"sliding_window": 17}},
    ),
    Family(
        "mistral",
        BASE | {"model_type": "mistral", "sliding_window": None, "head_dim": 12, "rope_parameters": DEFAULT_ROPE},
        alter={"no window": {"sliding_window": 32}},
    ),
    Family(
        "qwen2",
        BASE | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE},
        variants=("qwen2-legacy",),
    ),
    Family(
        # Windows in the upper layers only, as max_window_layers asks.
        "qwen2-untied-window",
        BASE
        | {
            "model_type": "qwen2",
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "rope_parameters": DEFAULT_ROPE,
        },
        alter={
            "window": {"use_sliding_window": False, "sliding_window": None, "layer_types": None},
            "first layer full": {"max_window_layers": 0, "layer_types": None},
        },
    ),
    Family(
        "qwen3",
        BASE | {"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE},
    ),
    Family(
        "qwen3-moe",
        MOE | {"norm_topk_prob": True, "tie_word_embeddings": True},
        alter={
            "renormalized shares": {"norm_topk_prob": False},
            "experts per token": {"num_experts_per_tok": 2},
        },
        variants=("qwen3-moe-stacked",),
    ),
    Family(
        # The first layer is dense, and the shares of the chosen experts do not add up to one.
        "qwen3-moe-dense-first",
        MOE | {"norm_topk_prob": False, "mlp_only_layers": [0], "num_hidden_layers": 3},
        alter={
            "shares": {"norm_topk_prob": True},
            "experts per token": {"num_experts_per_tok": 2},
        },
    ),
    Family(
        "mixtral",
        BASE
        | {
            "model_type": "mixtral",
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_parameters": DEFAULT_ROPE,
        },
        alter={"experts per token": {"num_experts_per_tok": 1}},
    ),
    Family(
        "deepseek-v2",
        DEEPSEEK
        | {
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            "rope_parameters": DEFAULT_ROPE,
        },
        alter={
            "groups": {"topk_method": "greedy"},
            "scale of the shares": {"routed_scaling_factor": 1.0},
            "rope base": {"rope_parameters": DEFAULT_ROPE | {"rope_theta": 5000.0}},
        },
    ),
    Family(
        "deepseek-v3",
        DEEPSEEK
        | {
            "model_type": "deepseek_v3",
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "num_mtp_layers": 0,
            "rope_parameters": DEEPSEEK_ROPE,
        },
        alter={
            "groups": {"n_group": 1, "topk_group": 1},
            "scale of the shares": {"routed_scaling_factor": 1.0},
            "renormalized shares": {"norm_topk_prob": False},
            "scaling": {"rope_parameters": DEFAULT_ROPE},
            "attention scale": {"rope_parameters": DEEPSEEK_ROPE | {"mscale_all_dim": 0.7, "mscale": 0.7}},
        },
    ),
    Family(
        "gemma3",
        GEMMA,
        embedding_strength=0.1,
        zero_centered_norm=True,
        alter=GEMMA_ALTER | {"which base is whose": {"rope_parameters": _swapped(GEMMA["rope_parameters"])}},
    ),
    Family(
        "gemma3-linear-rope",
        GEMMA | {"rope_parameters": GEMMA_LINEAR_ROPE},
        embedding_strength=0.1,
        zero_centered_norm=True,
        alter=GEMMA_ALTER
        | {
            "scaling": {"rope_parameters": GEMMA["rope_parameters"]},
            "scaling of windows": {"rope_parameters": _swapped(GEMMA_LINEAR_ROPE)},
        },
        variants=("gemma3-linear-rope-legacy",),
    ),
)


def make_config(settings: dict[str, Any]) -> Any:
    settings = copy.deepcopy(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def make_model(family: Family, seed: int) -> Any:
    """The model with random weights, none of them a value (one, zero) that would hide a missing term."""
    model = AutoModelForCausalLM.from_config(make_config(family.config), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in name:
                # The last norm makes up for a weak tied embedding, so that logits have the same size everywhere.
                scale = BASE_STRENGTH / family.embedding_strength if name == "model.norm.weight" else 1.0
                weight.copy_(scale * (1 + 0.3 * noise) - float(family.zero_centered_norm))
            else:
                weight.copy_((family.embedding_strength if "embed" in name else BASE_STRENGTH) * noise)
            weight.copy_(weight.to(getattr(torch, family.dtype)).float())
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.copy_(0.2 * torch.randn(values.shape, generator=generator))
    return model


def forward(model: Any, token_ids: list[int]) -> np.ndarray:
    """Logits of all positions, [len(token_ids), vocab], without a cache."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy continuation, past any end token, and the gap between the two best logits at each step."""
    token_ids, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        last = forward(model, token_ids)[-1]
        second, best = np.argsort(last)[-2:]
        gaps.append(round(float(last[best] - last[second]), 5))
        token_ids.append(int(best))
    return token_ids[len(prompt) :], gaps


def rounding_noise(model: Any, prompt: list[int], seed: int) -> float:
    """The largest change of a logit when each weight is moved by a relative error of one float32 rounding."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1 + 2.0**-24 * torch.randn(weight.shape, generator=generator))
    return float(np.abs(forward(moved, prompt) - forward(model, prompt)).max())


def effects(family: Family, model: Any, prompt: list[int]) -> dict[str, float]:
    """For each feature, the largest change of a logit when the same weights run under the altered configuration."""
    expected, found = forward(model, prompt), {}
    for feature, changes in (family.alter | {"norm epsilon": {"rms_norm_eps": 1e-6}}).items():
        altered = AutoModelForCausalLM.from_config(make_config(family.config | changes), dtype=torch.float32).eval()
        altered.load_state_dict(model.state_dict())
        found[feature] = float(np.abs(forward(altered, prompt) - expected).max())
    return found


def try_seed(family: Family, seed: int) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]] | str:
    """The model, its golden.json and its golden.npz; or why this seed is unfit."""
    model = make_model(family, seed)
    rng = np.random.default_rng(seed)
    vocab = family.config["vocab_size"]
    prompts, logits = [], {}
    for name, length in PROMPT_LENGTHS.items():
        token_ids = [family.config["bos_token_id"], *rng.integers(3, vocab, length - 1).tolist()]
        continuation, gaps = greedy(model, token_ids)
        if min(gaps) < MIN_GAP:
            return f"gap {min(gaps):.1e} in {name}"
        if len(set(continuation)) < MIN_DISTINCT:
            return f"only {len(set(continuation))} distinct tokens in {name}"
        prompts.append({"name": name, "token_ids": token_ids, "continuation": continuation, "gaps": gaps})
        if name in WITH_LOGITS:
            logits[name] = forward(model, token_ids)
    longest = prompts[-1]["token_ids"]
    if (noise := rounding_noise(model, longest, seed)) > MAX_NOISE:
        return f"rounding noise {noise:.1e}"
    seen = effects(family, model, longest)
    if weak := [feature for feature, change in seen.items() if change < MIN_EFFECT]:
        return f"no visible effect of {', '.join(weak)}"
    golden = {
        "seed": seed,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "stored_dtype": family.dtype,
        "rounding_noise": noise,
        "effects": seen,
        "prompts": prompts,
    }
    return model, golden, logits


def save(family: Family, model: Any, golden: dict[str, Any], logits: dict[str, np.ndarray], out: Path) -> None:
    folder = out / family.name
    stored = copy.deepcopy(model).to(getattr(torch, family.dtype))
    stored.save_pretrained(folder)
    np.savez_compressed(folder / "golden.npz", **logits)
    _write_json(folder / "golden.json", golden)
    for variant in family.variants:
        target = out / variant
        shutil.rmtree(target, ignore_errors=True)
        if variant.endswith("-sharded"):
            stored.save_pretrained(target, max_shard_size="40KB")
        elif variant.endswith("-stacked"):
            stored.save_pretrained(target, save_original_format=False)
        else:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("golden.*"))
            config = json.loads((folder / "config.json").read_text())
            _write_json(target / "config.json", legacy_config(config), indent=2)
        _write_json(target / "golden.json", {"same_as": family.name})


def legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as transformers 4 wrote it: rope at the top level, torch_dtype, patterns instead of lists."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    if "full_attention" in rope:
        for name in ("layer_types", "_sliding_window_pattern", "use_bidirectional_attention"):
            config.pop(name)
        config["sliding_window_pattern"] = 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    elif "layer_types" in config:
        config.pop("layer_types")
        config["sliding_window"] = 4096  # written, and unused while use_sliding_window is false
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return dict(sorted(config.items()))


def check_reload(family: Family, golden: dict[str, Any], logits: dict[str, np.ndarray], out: Path) -> None:
    """What was saved, read back by transformers, must give the recorded logits: folder, variants and all."""
    for name in (family.name, *family.variants):
        model = AutoModelForCausalLM.from_pretrained(
            out / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for prompt in golden["prompts"]:
            if prompt["name"] in logits:
                np.testing.assert_array_equal(forward(model, prompt["token_ids"]), logits[prompt["name"]], err_msg=name)


def _write_json(path: Path, value: Any, indent: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=indent) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that receives one folder per model")
    parser.add_argument("--only", nargs="*", help="names of families; default all")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to try for a family")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for family in FAMILIES:
        if arguments.only and family.name not in arguments.only:
            continue
        for seed in range(arguments.seeds):
            result = try_seed(family, seed)
            if not isinstance(result, str):
                break
            print(f"{family.name}: seed {seed}: {result}", flush=True)
        else:
            raise SystemExit(f"{family.name}: no seed below {arguments.seeds} is fit")
        model, golden, logits = result
        save(family, model, golden, logits, arguments.out)
        check_reload(family, golden, logits, arguments.out)
        largest = max(float(np.abs(array).max()) for array in logits.values())
        smallest = min(min(prompt["gaps"]) for prompt in golden["prompts"])
        print(
            f"{family.name}: seed {seed} saved; |logit| <= {largest:.1f}, gaps >= {smallest:.1e}, "
            f"noise {golden['rounding_noise']:.1e}, effects {golden['effects']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
