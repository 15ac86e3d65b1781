"""Which settings are combined: one axis per feature, crossed so that every two settings meet in some combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from combo_jobs import MAX_MODEL_LEN, Job, with_grammar, with_logprobs, with_penalties
from combo_models import WINDOWS

from noria.cache.layout import blocks_for_request, plan_layout
from noria.ops import native


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to set a feature."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine; change no answer
    numerics: Mapping[str, Any] = field(default_factory=dict)  # change answers: for those alone too
    tweak: Callable[[Job], Job] | None = None  # of every request, for those alone too
    model: str | None = None
    spare_blocks: int | None = None  # of the pool, beyond the longest request
    must_see: tuple[str, ...] = ()  # what has to happen in a life, lest the setting be tested in vain
    must_not_see: tuple[str, ...] = ()
    makes_rare: tuple[str, ...] = ()  # what need not happen for others' sake
    excludes: tuple[str, ...] = ()  # names of settings that engines refuse together with it
    quick: bool = False  # part of the default tests

    def goes_with(self, other: Setting) -> bool:
        return other.name not in self.excludes and self.name not in other.excludes


_TRIES = 20  # of pairwise
NATIVE_ONLY = (
    (Setting("int8-int8", numerics={"quantization": "int8", "quantize_activations": True}),)
    if native.available()
    else ()
)


def _ngram(count: int, shortest: int) -> dict[str, Any]:
    """So short a match is a bad guess, which makes many drafts, most of them wrong."""
    options = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": shortest}
    return {"speculative_config": options}


# The first setting of an axis is the usual one. Add an axis or a setting here; nothing else needs to change.
AXES: dict[str, tuple[Setting, ...]] = {
    "model": (
        Setting("gemma3", model="gemma3", quick=True),
        Setting("qwen2", model="qwen2", quick=True),
        Setting("qwen3-moe", model="qwen3-moe"),
        Setting("deepseek-v3", model="deepseek-v3"),
        Setting("llama-wide", model="llama-wide"),
    ),
    "prefix": (
        Setting("prefix", {"enable_prefix_caching": True}, must_see=("cached tokens",), quick=True),
        Setting("no-prefix", {"enable_prefix_caching": False}, must_not_see=("cached tokens",), quick=True),
    ),
    "buckets": (
        Setting("doubling", quick=True),
        Setting("gap", {"token_bucket_gap": 32}, quick=True),
        Setting("extra", {"extra_token_buckets": (5, 24)}, quick=True),
        Setting("one-by-one", {"extra_token_buckets": tuple(range(2, 13))}),
    ),
    "budget": (
        Setting("8x64", {"max_num_seqs": 8, "max_num_batched_tokens": 64}, quick=True),
        Setting("5x17", {"max_num_seqs": 5, "max_num_batched_tokens": 17}, quick=True),
        Setting("16x96", {"max_num_seqs": 16, "max_num_batched_tokens": 96}),
        Setting("40x300", {"max_num_seqs": 40, "max_num_batched_tokens": 300}),
    ),
    "pool": (
        Setting("tight", spare_blocks=4, must_see=("preempted",), quick=True),
        Setting("roomy", spare_blocks=4000, must_not_see=("preempted",), quick=True),
    ),
    "policy": (
        Setting("fcfs", {"scheduling_policy": "fcfs"}, quick=True),
        Setting("priority", {"scheduling_policy": "priority"}, quick=True),
    ),
    "run-ahead": (
        Setting("ahead", {"async_scheduling": True}, quick=True),
        Setting("plain", {"async_scheduling": False}, quick=True),
    ),
    "bursts": (
        Setting("step-by-step", must_not_see=("bursts",), quick=True),
        Setting("burst4", {"num_scheduler_steps": 4}, must_see=("bursts",), quick=True),
        Setting("burst7", {"num_scheduler_steps": 7}, must_see=("bursts",)),
    ),
    "speculation": (
        Setting("no-drafts", must_not_see=("drafts",), quick=True),
        Setting("ngram", _ngram(4, 1), must_see=("right drafts", "wrong drafts"), makes_rare=("bursts",), quick=True),
        Setting("ngram7", _ngram(7, 2), must_see=("drafts",), makes_rare=("bursts",)),
        # Of random weights: it is right where the noise of high temperatures decides. The folder depends on the model.
        Setting(
            "eagle3",
            {"speculative_config": {"method": "eagle3", "model": "", "num_speculative_tokens": 3}},
            must_see=("right drafts", "wrong drafts"),
            makes_rare=("bursts",),
            quick=True,
        ),
        # Of random weights, too. The bytes are those of its pool, in which not everybody finds room; the target's has a
        # number of blocks.
        Setting(
            "draft-model",
            {
                "speculative_config": {"method": "draft_model", "model": "", "num_speculative_tokens": 3},
                "kv_cache_memory_bytes": 1 << 17,
            },
            must_see=("right drafts", "wrong drafts"),
            makes_rare=("bursts",),
        ),
    ),
    # Of the tables: a third as long in all rows, and whole ones in a third of them.
    "shapes": (
        Setting("one-shape", must_not_see=("divided steps",), quick=True),
        Setting(
            "two-shapes",
            {"most_model_len": 96},
            must_see=("divided steps",),
            makes_rare=("bursts",),
            excludes=("eagle3",),
        ),
    ),
    "block": tuple(Setting(f"block{size}", {"block_size": size}, quick=size == 16) for size in (16, 8, 32)),
    "cache": tuple(
        Setting(f"kv-{dtype}", numerics={"kv_cache_dtype": dtype}, quick=dtype == "auto")
        for dtype in ("auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8")
    ),
    "dtype": tuple(
        Setting(dtype, numerics={"dtype": dtype}, quick=dtype == "float32") for dtype in ("float32", "bfloat16")
    ),
    "ops": (
        Setting("best-ops", quick=True),
        Setting("xla-ops", numerics={"linear_backend": "xla", "attention_backend": "xla"}, quick=True),
        Setting("int8", numerics={"quantization": "int8"}),
        *NATIVE_ONLY,
    ),
    "requests": (
        Setting("mixed", quick=True),
        Setting("greedy", tweak=lambda job: job.with_params(temperature=0.0, seed=None)),
        Setting("n3", tweak=lambda job: job.with_params(n=3)),
    ),
    "grammar": (
        Setting("free", must_not_see=("structured",), quick=True),
        Setting("structured", tweak=with_grammar, must_see=("structured", "held"), makes_rare=("bursts",), quick=True),
    ),
    # Bursts are for steps in which nobody is shaped.
    "shaping": (
        Setting("unshaped", must_not_see=("penalized",), quick=True),
        Setting("penalties", tweak=with_penalties, must_see=("penalized",), makes_rare=("bursts",), quick=True),
        Setting(
            "logprobs",  # raw ones, which penalties must not change
            tweak=lambda job: with_logprobs(with_penalties(job)),
            must_see=("penalized", "logprobs", "prompt logprobs"),
            makes_rare=("bursts",),
            quick=True,
        ),
        Setting(
            "processed",
            numerics={"logprobs_mode": "processed_logprobs"},
            tweak=lambda job: with_logprobs(with_penalties(job)),
            must_see=("penalized", "logprobs", "prompt logprobs"),
            makes_rare=("bursts",),
        ),
    ),
}


@dataclass(frozen=True)
class Combo:
    settings: tuple[Setting, ...]  # one of each axis

    def __str__(self) -> str:
        return "-".join(setting.name for setting in self.settings)

    @property
    def model(self) -> str:
        return next(setting.model for setting in self.settings if setting.model)

    @property
    def numerics(self) -> dict[str, Any]:
        return {name: value for setting in self.settings for name, value in setting.numerics.items()}

    @property
    def options(self) -> dict[str, Any]:
        """All options of the engine."""
        options = {name: value for setting in self.settings for name, value in setting.options.items()}
        spare = next(setting.spare_blocks for setting in self.settings if setting.spare_blocks is not None)
        longest = longest_request(self.model, options["block_size"], options["max_num_batched_tokens"])
        options["num_blocks_override"] = longest + 1 + spare
        return options | self.numerics

    @property
    def must_see(self) -> set[str]:
        rare = {name for setting in self.settings for name in setting.makes_rare}
        return {name for setting in self.settings for name in setting.must_see} - rare

    def tweak(self, job: Job) -> Job:
        for setting in self.settings:
            if setting.tweak is not None:
                job = setting.tweak(job)
        return job


def longest_request(model: str, block_size: int, budget: int) -> int:
    """Blocks that a request of MAX_MODEL_LEN tokens holds when a step computes up to `budget` of them."""
    return blocks_for_request(plan_layout(WINDOWS[model]), MAX_MODEL_LEN, block_size, min(budget, MAX_MODEL_LEN))


def pairwise(axes: Iterable[tuple[Setting, ...]], given: tuple[Combo, ...] = ()) -> list[Combo]:
    """Few combinations in which every two settings of different axes meet that go together: the fewest of some tries.
    They begin with those that are given."""
    axes = tuple(axes)
    return min((_pairwise(axes, given, random.Random(seed)) for seed in range(_TRIES)), key=len)


def _pairwise(axes: tuple[tuple[Setting, ...], ...], given: tuple[Combo, ...], rng: random.Random) -> list[Combo]:
    """Greedy: each combination takes, axis by axis, the setting that completes the most of the missing pairs."""
    missing = {
        frozenset((one, other))
        for axis, more in itertools.combinations(axes, 2)
        for one, other in itertools.product(axis, more)
        if one.goes_with(other)
    }
    combos = list(given)
    for combo in given:
        missing -= {frozenset(pair) for pair in itertools.combinations(combo.settings, 2)}
    while missing:
        # One missing pair is taken as it is, so that every round makes progress.
        first = rng.choice(sorted(missing, key=lambda pair: sorted(setting.name for setting in pair)))
        chosen = {index: setting for index, axis in enumerate(axes) for setting in axis if setting in first}
        for index in rng.sample(range(len(axes)), len(axes)):
            if index not in chosen:
                chosen[index] = _most_useful(axes[index], chosen.values(), missing)
        settings = tuple(chosen[index] for index in range(len(axes)))
        missing -= {frozenset(pair) for pair in itertools.combinations(settings, 2)}
        combos.append(Combo(settings))
    return combos


def _most_useful(axis: tuple[Setting, ...], chosen: Iterable[Setting], missing: set[frozenset[Setting]]) -> Setting:
    chosen = tuple(chosen)
    possible = [setting for setting in axis if all(map(setting.goes_with, chosen))]
    return max(possible, key=lambda setting: sum(frozenset((setting, other)) in missing for other in chosen))


def quick_combos() -> list[Combo]:
    """Of the settings marked quick; in the first few of them each meets most of the others."""
    quick = (tuple(setting for setting in axis if setting.quick) for axis in AXES.values())
    return pairwise(quick, (hardest_combo(),))


def hardest_combo() -> Combo:
    """Everything at once that bookkeeping can get wrong."""
    chosen = {"gemma3", "prefix", "gap", "5x17", "tight", "priority", "ahead", "burst4", "structured", "logprobs"}
    wanted = lambda axis: next((setting for setting in axis if setting.name in chosen), axis[0])
    return Combo(tuple(wanted(axis) for axis in AXES.values()))


def all_combos() -> list[Combo]:
    return pairwise(AXES.values())
