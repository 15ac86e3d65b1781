"""Programs that were compiled elsewhere: an engine starts from a folder, or says by name why it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noria import LLM, EngineConfig, SamplingParams
from noria.engine import startup
from noria.errors import ConfigError
from noria.runner.stored import StoredPrograms, file_name, save

OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "dtype": "float32",
    "num_blocks_override": 9,
}
PROMPT = {"prompt_token_ids": [3, 9, 27, 41]}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answer(llm: LLM) -> list[int]:
    (told,) = llm.generate(PROMPT, GREEDY)
    return list(told.outputs[0].token_ids)


@pytest.fixture(scope="module")
def made(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A folder with programs for this machine, and what they answered where they were made."""
    folder = tmp_path_factory.mktemp("programs")
    # What JAX has from its cache cannot be written again on a CPU.
    with LLM(model=str(tiny_text_model), compile_cache_dir="", **OPTIONS) as llm:
        runner = llm.engine.core.runner
        save(folder, runner.origin, 9, runner._programs._compiled)
        yield folder, answer(llm)


def options(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(model), "programs_dir": folder, "compile_cache_dir": "", **OPTIONS, **changes}


def test_an_engine_starts_without_compiling(made: Any, tiny_text_model: Path) -> None:
    folder, expected = made
    with LLM(strict_compile=True, **options(tiny_text_model, folder, num_blocks_override=None)) as llm:
        report = llm.stats.startup
        assert (report.programs, report.compiled, report.memory.num_blocks) == (7, 0, 9)
        assert answer(llm) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 4}, "another max_num_seqs: 2 there, 4 here; give it the same max_num_seqs"),
        ({"most_model_len": 32}, "another most_model_len: none there, 32 here; give it the same most_model_len"),
        ({"num_blocks_override": 8}, r"num_blocks_override \(8\) is not the 9 blocks"),
        ({"dtype": "bfloat16"}, "another dtype: float32 there, bfloat16 here; make them anew"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "another speculative_config: none there, .*ngram.* here; give it the same speculative_config",
        ),
        ({"skip_tokenizer_init": True, "max_logprobs": 3}, "another max_logprobs: 20 there, 3 here"),
    ],
)
def test_programs_for_something_else(made: Any, tiny_text_model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        startup.start(EngineConfig(**options(tiny_text_model, made[0], **changes)))


def changed(stored: StoredPrograms, folder: Path, **origin: Any) -> Path:
    """A manifest that tells another origin."""
    told = {"origin": {**stored.origin, **origin}, "num_blocks": stored.num_blocks, "programs": dict(stored.digests)}
    (folder / "manifest.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("name", ["jax", "jaxlib", "noria", "the code of noria", "kind of device", "model"])
def test_other_versions_are_refused_by_name(made: Any, tiny_text_model: Path, tmp_path: Path, name: str) -> None:
    folder = changed(StoredPrograms.open(made[0]), tmp_path, **{name: "0.1"})
    with pytest.raises(ConfigError, match=f"its programs are for another {name}: 0.1 there, .* here; make them anew"):
        startup.start(EngineConfig(**options(tiny_text_model, folder)))


def test_damage_is_found(made: Any, tiny_text_model: Path, tmp_path: Path) -> None:
    folder = changed(StoredPrograms.open(made[0]), tmp_path)
    with pytest.raises(ConfigError, match=r"\.bin is missing or damaged"):
        startup.start(EngineConfig(**options(tiny_text_model, folder)))


def test_a_folder_without_programs(tiny_text_model: Path, tmp_path: Path) -> None:
    for text in (None, "{", "[]", "{}"):
        if text is not None:
            (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match="there are no programs with a manifest; make them with noria compile"):
            startup.start(EngineConfig(**options(tiny_text_model, tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        save(tmp_path / "file", {}, 1, {})


def test_compiling_and_fetching_at_once_is_refused(tiny_text_model: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(EngineConfig(**options(tiny_text_model, tmp_path)), compile_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="programs_dir: here programs are compiled, not fetched"):
        startup.compile_programs(config)


def test_several_hosts_have_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"programs_dir: programs in a folder are for one host, not for nnodes 2; leave"
    ):
        EngineConfig(**options(tmp_path, tmp_path, nnodes=2))


def test_names_of_files() -> None:
    assert file_name(("sample shaped", 8)) == "sample-shaped-8"
    assert file_name("tables") == "tables"
