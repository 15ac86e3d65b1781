"""What speculative_config may be, and what is said of one that may not."""

from __future__ import annotations

from typing import Any

import pytest

from noria.batch.buckets import Buckets, rows_with_drafts
from noria.config import EngineConfig, ModelLimits, ResolvedConfig
from noria.errors import ConfigError
from noria.speculative_config import SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def resolved(**options: Any) -> ResolvedConfig:
    return EngineConfig(model="m", **options).resolve(ModelLimits(4096, 100), "cpu")


def test_json_and_dictionary_are_the_same() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert resolved(speculative_config=NGRAM) == resolved(speculative_config=text)
    speculation = resolved(speculative_config=text).speculation
    assert speculation == SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert resolved().speculation is None


def test_a_config_can_be_given_again() -> None:
    config = EngineConfig(model="m", speculative_config=NGRAM)
    assert EngineConfig(model="m", speculative_config=config.speculative_config) == config


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"method": "magic", "num_speculative_tokens": 3}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 3}, "method is missing"),
        (NGRAM | {"num_speculative_tokens": 0}, "must be 1 to 16, not 0"),
        (NGRAM | {"num_speculative_tokens": 17}, "must be 1 to 16, not 17"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
        (NGRAM | {"prompt_lookup_min": 6}, "at most prompt_lookup_max"),
        (NGRAM | {"prompt_lookup": 6}, "unknown option prompt_lookup"),
        (NGRAM | {"model": "m"}, "model belongs to the method draft_model or eagle3, not to ngram"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "eagle3 needs a model"),
        ({"method": "eagle3", "model": "m", "num_speculative_tokens": 17}, "must be 1 to 16, not 17"),
        (
            {"method": "eagle3", "model": "m", "num_speculative_tokens": 3, "prompt_lookup_min": 3},
            "prompt_lookup_min belongs to the method ngram, not to eagle3",
        ),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "draft_model needs a model"),
        (
            {"method": "draft_model", "model": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
            "prompt_lookup_max belongs to the method ngram",
        ),
        (
            {"method": "draft_model", "model": "m", "num_speculative_tokens": 3, "quantization": "q4"},
            "quantization must",
        ),
        ("{", "it must be JSON"),
        ("3", "it must be a JSON object"),
        ({1: 2}, "it must be a JSON object"),
        (3, "speculative_config must be"),
    ],
)
def test_what_is_wrong_is_named(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as caught:
        EngineConfig(model="m", speculative_config=given)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_model_len": 4}, "max_model_len"), ({"max_num_seqs": 2, "max_num_batched_tokens": 4}, "batched_tokens")],
)
def test_a_burst_that_never_fits(options: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolved(speculative_config=NGRAM, **options)


@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
def test_every_method_goes_with_every_mesh(method: str) -> None:
    options = {"method": method, "num_speculative_tokens": 3} | ({"model": "m"} if method != "ngram" else {})
    for sizes in (
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        {"data_parallel_size": 2, "attention_data_parallel_size": 2},
        {"nnodes": 2, "tensor_parallel_size": 2},
    ):
        assert resolved(speculative_config=options, **sizes).speculation is not None


@pytest.mark.parametrize(
    ("seqs", "budget", "most", "rows"),
    [
        (1, 64, 5, (2, 5)),
        (8, 64, 40, (8, 16, 32, 40)),
        (8, 16, 16, (8, 16)),
        (20, 100, 64, (8, 16, 20, 32, 64)),
        (64, 512, 64, (8, 16, 32, 64)),
        (100, 512, 64, (8, 16, 32, 64, 100)),
    ],
)
def test_rows_of_the_head(seqs: int, budget: int, most: int, rows: tuple[int, ...]) -> None:
    """As many as the requests and drafts that a step can have; each of them is a token of the step."""
    config = resolved(speculative_config=NGRAM, max_num_seqs=seqs, max_num_batched_tokens=budget)
    buckets = Buckets.of(config)
    assert (rows_with_drafts(config), buckets.with_drafts, buckets.num_logit_rows) == (most, rows, rows[-1])
    plain = resolved(max_num_seqs=seqs, max_num_batched_tokens=budget)
    assert (rows_with_drafts(plain), Buckets.of(plain).with_drafts) == (0, ())
    assert Buckets.of(plain).num_logit_rows == Buckets.of(plain).requests[-1]
