"""noria.config: every value is checked, every message names the option, and resolve() leaves no size open."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from noria.checks import hints, is_a
from noria.config import EngineConfig, ModelLimits, SamplingParams, StructuredOutputsParams, cache_home
from noria.errors import ConfigError, NoriaError, RequestError

LIMITS = ModelLimits(max_position_embeddings=4096, vocab_size=1000)


def one_line_about(option: str) -> str:
    """A pattern for messages that start with the option's name and stay on one line."""
    return rf"\A{option}\b[^\n]+\Z"


# ---------------------------------------------------------------------------------------------- SamplingParams


def test_sampling_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert params.stop == ()
    assert params.stop_strings == ()
    assert params.stop_token_ids == ()
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("presence_penalty", None),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -math.inf),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e-7),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: -100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1: "high"}),
        ("logit_bias", [(1, 2)]),
        ("logit_bias", ((1, 2, 3),)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", 5),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", ["x", " "]),
        ("bad_words", [3]),
        ("bad_token_ids", ["3"]),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", 2.0),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", "all"),
        ("n", 0),
        ("n", -1),
        ("n", 1.0),
        ("n", True),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 17),  # more than the default max_tokens
        ("min_tokens", None),
        ("stop", ""),
        ("stop", ["fine", ""]),
        ("stop", ["fine", 3]),
        ("stop", 3),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", 0),
    ],
)
def test_bad_sampling_values_are_refused(option: str, value: object) -> None:
    with pytest.raises(RequestError, match=one_line_about(option)):
        SamplingParams(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("repetition_penalty", 1e-3),
        ("repetition_penalty", 10),
        ("allowed_token_ids", None),
        ("logprobs", 0),
        ("logprobs", 1000),
        ("prompt_logprobs", 0),
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 0),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 0),
        ("min_p", 1),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("seed", None),
        ("max_tokens", 1),
        ("max_tokens", None),
        ("min_tokens", 16),
        ("stop_token_ids", None),
    ],
)
def test_values_at_the_edge_are_taken(option: str, value: object) -> None:
    wanted = () if option == "stop_token_ids" else value
    assert getattr(SamplingParams(**{option: value}), option) == wanted


def test_min_tokens_without_a_maximum() -> None:
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_stop_is_always_a_tuple(stop: object) -> None:
    assert SamplingParams(stop=stop).stop_strings == ("END",)


def test_sampling_params_do_not_follow_the_callers_list() -> None:
    words, ids = ["a"], [1]
    params = SamplingParams(stop=words, stop_token_ids=ids)
    words.append("b")
    ids.append(2)
    assert (params.stop_strings, params.stop_token_ids) == (("a",), (1,))


def test_sampling_params_are_frozen_values() -> None:
    params = SamplingParams(seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert params == SamplingParams(seed=1)
    assert hash(params) == hash(SamplingParams(seed=1))
    assert dataclasses.replace(params, stop="x").stop_strings == ("x",)


def test_unknown_sampling_parameter() -> None:
    with pytest.raises(RequestError, match=r"temprature; did you mean temperature\?"):
        SamplingParams(temprature=0.5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match=r"flavour; known options: n, temperature, .*prompt_logprobs"):
        SamplingParams.from_options(flavour="sour")
    with pytest.raises(RequestError, match="best_of is not supported"):
        SamplingParams.from_options(best_of=3)
    with pytest.raises(RequestError, match="by name"):
        SamplingParams(0.5)  # pyright: ignore[reportCallIssue]
    assert SamplingParams.from_options(temperature=0.5) == SamplingParams(temperature=0.5)


def test_structured_outputs_are_frozen_values() -> None:
    schema: dict = {"type": "object"}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert (params.kind, params.json) == ("json", '{"type": "object"}')
    asked = SamplingParams(structured_outputs=params)
    assert asked.is_shaped
    assert copy.deepcopy(asked) == pickle.loads(pickle.dumps(asked)) == dataclasses.replace(asked) == asked
    assert hash(asked) == hash(SamplingParams(structured_outputs=StructuredOutputsParams(json='{"type": "object"}')))
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.json = None  # pyright: ignore[reportAttributeAccessIssue]


def test_sampling_params_can_be_copied_and_sent() -> None:
    params = SamplingParams(logit_bias={3: 1.5, 1: -2}, bad_words=["x"], allowed_token_ids=[4], logprobs=2, seed=3)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))
    assert params.biases == ((1, -2), (3, 1.5))


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": {1: 0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"bad_token_ids": [1]},
        {"logprobs": 0},
    ],
)
def test_what_needs_more_of_the_sampler(options: dict) -> None:
    params = SamplingParams(**options)
    assert params.is_shaped
    assert params.is_penalized == any("penalty" in name for name in options)


def test_what_does_not() -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    assert not SamplingParams(**neutral, bad_words=[], bad_token_ids=[], prompt_logprobs=3, top_k=4, seed=1).is_shaped


# ------------------------------------------------------------------------------------------------ EngineConfig


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", None),
        ("model", 7),
        ("tokenizer", 7),
        ("revision", b"main"),
        ("load_format", "safetensors"),
        ("dtype", "float64"),
        ("dtype", None),
        ("seed", 1.5),
        ("device", "cuda"),
        ("max_model_len", 0),
        ("max_model_len", "4096"),
        ("max_model_len", True),
        ("most_model_len", 0),
        ("most_model_len", "256"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 8.0),
        ("max_num_seqs", 2**16 + 1),
        ("max_num_batched_tokens", -1),
        ("max_logprobs", -1),
        ("max_logprobs", None),
        ("logprobs_mode", "raw_logits"),
        ("token_bucket_gap", -16),
        ("token_bucket_gap", None),
        ("num_scheduler_steps", 0),
        ("num_scheduler_steps", 129),
        ("num_scheduler_steps", None),
        ("num_scheduler_steps", True),
        ("extra_token_buckets", (0,)),
        ("extra_token_buckets", [-1]),
        ("extra_token_buckets", ("48",)),
        ("extra_token_buckets", 48),
        ("kv_cache_dtype", "fp8"),
        ("block_size", 0),
        ("block_size", None),
        ("num_blocks_override", 0),
        ("memory_utilization", 0),
        ("memory_utilization", 1.1),
        ("memory_utilization", math.nan),
        ("memory_utilization", "90%"),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", "4G"),
        ("enable_prefix_caching", 1),
        ("attention_backend", "flash"),
        ("compile_cache_dir", b"programs"),
        ("compile_threads", 0),
        ("strict_compile", "yes"),
    ],
)
def test_bad_options_are_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=one_line_about(option)):
        EngineConfig.from_options(**{"model": "some-model", option: value})


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
def test_integers_that_no_device_has_are_refused(value: int) -> None:
    """Of every option that is one, or has some in it: numpy, JAX and sockets would say it in words of their own."""
    wide = ("kv_cache_memory_bytes",)  # nothing is made of it but a quotient
    for field, kind in hints(EngineConfig).items():
        for given in (value, [value]):
            if is_a(tuple(given) if isinstance(given, list) else given, kind) and field not in wide:
                if field == "seed" and value < 2**64:
                    continue
                with pytest.raises(ConfigError, match=one_line_about(field)):
                    EngineConfig.from_options(**{"model": "some-model", field: given})
    assert EngineConfig(model="m", kv_cache_memory_bytes=value, seed=2**64 - 1).kv_cache_memory_bytes == value
    with pytest.raises(ConfigError, match="seed must fit 64 bits"):
        EngineConfig(model="m", seed=-(2**63) - 1)


def test_a_refused_choice_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=re.escape("one of auto, float32, bfloat16, float16")):
        EngineConfig(model="m", dtype="float64")  # pyright: ignore[reportArgumentType]


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"\Aunknown option max_num_seq; did you mean max_num_seqs\?\Z"):
        EngineConfig.from_options(model="m", max_num_seq=4)


def test_unknown_option_unlike_any_lists_all() -> None:
    with pytest.raises(ConfigError, match="unknown option zzz; known options: ") as caught:
        EngineConfig.from_options(model="m", zzz=4)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(EngineConfig))


def test_from_options_equals_the_constructor() -> None:
    assert EngineConfig.from_options(model="m", block_size=8) == EngineConfig(model="m", block_size=8)
    paths: Any = {name: Path("a") / "b" for name in ("model", "tokenizer", "compile_cache_dir")}
    assert EngineConfig(**paths) == EngineConfig(model="a/b", tokenizer="a/b", compile_cache_dir="a/b")


def test_buckets_may_be_a_list_and_become_a_tuple() -> None:
    config = EngineConfig.from_options(model="m", extra_token_buckets=[48, 96])
    assert config.extra_token_buckets == (48, 96)
    hash(config)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").block_size = 8  # pyright: ignore[reportAttributeAccessIssue]


# --------------------------------------------------------------------------------------------------- resolve()


@pytest.mark.parametrize(
    ("platform", "max_num_seqs", "budget"), [("cpu", 64, 512), ("gpu", 256, 2048), ("tpu", 256, 2048)]
)
def test_resolve_fills_in_every_size(platform: str, max_num_seqs: int, budget: int) -> None:
    config = EngineConfig(model="m").resolve(LIMITS, platform)
    assert config.max_model_len == LIMITS.max_position_embeddings
    assert config.max_num_seqs == max_num_seqs
    assert config.max_num_batched_tokens == budget
    assert config.compile_threads is not None
    assert 1 <= config.compile_threads <= 8
    assert config.compile_cache_dir


def test_resolve_keeps_what_was_given() -> None:
    given = EngineConfig(
        model="m",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        compile_threads=2,
        compile_cache_dir="",
        extra_token_buckets=(5,),
    )
    resolved = given.resolve(LIMITS, "cpu")
    assert dataclasses.asdict(resolved) == dataclasses.asdict(given)


def test_resolve_is_idempotent_and_leaves_the_original_alone() -> None:
    config = EngineConfig(model="m")
    once = config.resolve(LIMITS, "cpu")
    assert once.resolve(LIMITS, "cpu") == once
    assert config == EngineConfig(model="m")


def test_the_default_budget_grows_with_the_number_of_requests() -> None:
    config = EngineConfig(model="m", max_num_seqs=1000).resolve(LIMITS, "cpu")
    assert config.max_num_batched_tokens == 1000


def test_resolve_takes_the_whole_context_but_not_more() -> None:
    assert EngineConfig(model="m", max_model_len=4096).resolve(LIMITS, "cpu").max_model_len == 4096
    with pytest.raises(ConfigError, match=one_line_about("max_model_len")) as caught:
        EngineConfig(model="m", max_model_len=4097).resolve(LIMITS, "cpu")
    assert "the 4096 positions" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"most_model_len": 4096}, "lower it"),
        ({"most_model_len": 64, "max_model_len": 64}, "lower it"),
        ({"most_model_len": 64, "data_parallel_size": 2}, "data_parallel_size"),
        ({"most_model_len": 64, "attention_data_parallel_size": 2}, "leave it out"),
        (
            {
                "most_model_len": 64,
                "speculative_config": {"method": "eagle3", "model": "h", "num_speculative_tokens": 2},
            },
            "choose another method",
        ),
    ],
    ids=str,
)
def test_resolve_refuses_most_model_len_where_it_does_not_work(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=one_line_about("most_model_len")) as caught:
        EngineConfig(model="m", **options).resolve(LIMITS, "cpu")
    assert fix in str(caught.value)


def test_most_model_len_is_kept() -> None:
    assert EngineConfig(model="m").resolve(LIMITS, "cpu").most_model_len is None
    assert EngineConfig(model="m", most_model_len=4095).resolve(LIMITS, "cpu").most_model_len == 4095


def test_resolve_refuses_a_budget_below_one_token_a_request() -> None:
    EngineConfig(model="m", max_num_seqs=9, max_num_batched_tokens=9).resolve(LIMITS, "cpu")
    with pytest.raises(ConfigError, match=one_line_about("max_num_batched_tokens")) as caught:
        EngineConfig(model="m", max_num_seqs=9, max_num_batched_tokens=8).resolve(LIMITS, "cpu")
    assert "max_num_seqs (9)" in str(caught.value)


# ------------------------------------------------------------------------------------ folders and error classes


def test_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_HOME", "here")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert cache_home() == Path("here")
    monkeypatch.setenv("NORIA_HOME", "")
    assert cache_home() == Path("there/noria")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path.home() / ".cache" / "noria"


def test_programs_are_kept_in_the_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_HOME", "here")
    assert EngineConfig(model="m").resolve(LIMITS, "cpu").compile_cache_dir == str(Path("here/programs"))


@pytest.mark.parametrize("error", [ConfigError, RequestError])
def test_bad_values_are_value_errors_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)
    assert issubclass(error, NoriaError)
