"""Programs from a folder for an engine that drafts: those of the model, and of what drafts."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_heads import CONFIG, random_tensors, save_head

from noria import LLM, EngineConfig, SamplingParams
from noria.engine.draft_model import DraftModelProposer
from noria.engine.startup import start
from noria.errors import ConfigError
from noria.runner.runner import ModelRunner
from noria.runner.stored import DRAFT_FOLDER, StoredPrograms, save

NUM_BLOCKS = 12
SMALL: dict[str, Any] = {
    "num_blocks_override": NUM_BLOCKS,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "compile_cache_dir": "",
}
HOT = SamplingParams(temperature=4, max_tokens=40, ignore_eos=True, seed=1)  # random weights guess right now and then
Made = tuple[str, Path, Any]  # method, folder of the programs, and what was answered where they were made


def config_of(method: str, model: Path) -> dict[str, Any]:
    return {"method": method, "model": str(model), "num_speculative_tokens": 3}


def answers(llm: LLM) -> Any:
    return [result.outputs for result in llm.generate(["the mill", "A"], HOT)]


def save_programs(folder: Path, runner: ModelRunner, num_blocks: int) -> None:
    save(folder, runner.origin, num_blocks, runner._programs._compiled)


@pytest.fixture(scope="module")
def drafters(similar_model: Path, head: Path) -> dict[str, Path]:
    return {"draft_model": similar_model, "eagle3": head}


@pytest.fixture(scope="module", params=[pytest.param("draft_model", marks=pytest.mark.slow), "eagle3"])
def made(
    request: pytest.FixtureRequest,
    options: dict[str, Any],
    drafters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Made]:
    method, folder = request.param, tmp_path_factory.mktemp("programs")
    given = options | SMALL | {"speculative_config": config_of(method, drafters[method])}
    with LLM(**given) as llm:
        core = llm.engine.core
        assert isinstance(core.runner, ModelRunner)
        save_programs(folder, core.runner, NUM_BLOCKS)
        proposer = core.speculation._proposer
        if isinstance(proposer, DraftModelProposer):
            save_programs(folder / DRAFT_FOLDER, proposer._runner, proposer._caches[0].stats.num_blocks + 1)
        yield method, folder, answers(llm)
        assert llm.stats.speculation.num_accepted_tokens


def test_nothing_is_compiled(made: Made, options: dict[str, Any], drafters: dict[str, Path], tmp_path: Path) -> None:
    """What drafts lies elsewhere than where the programs were made."""
    method, folder, expected = made
    shutil.copytree(drafters[method], tmp_path / "moved")
    given = options | SMALL | {"speculative_config": config_of(method, tmp_path / "moved")}
    with LLM(**given | {"num_blocks_override": None}, programs_dir=str(folder)) as llm:
        report = llm.stats.startup
        stored = [StoredPrograms.open(path.parent) for path in folder.rglob("manifest.json")]
        assert report.programs == sum(len(each.digests) for each in stored)
        assert (report.compiled, report.memory.num_blocks) == (0, NUM_BLOCKS)
        assert answers(llm) == expected


def test_other_drafts_are_refused(made: Made, options: dict[str, Any], drafters: dict[str, Path]) -> None:
    method, folder, _ = made
    given = (
        options | SMALL | {"speculative_config": config_of(method, drafters[method]) | {"num_speculative_tokens": 2}}
    )
    with pytest.raises(ConfigError, match=r"another speculative_config: .* give it the same speculative_config"):
        start(EngineConfig(**given, programs_dir=str(folder)))


def test_what_drafts_must_be_the_same(
    made: Made, options: dict[str, Any], drafters: dict[str, Path], tmp_path: Path
) -> None:
    method, folder, _ = made
    copied = tmp_path / "programs"
    shutil.copytree(folder, copied)
    if method == "eagle3":
        other = copy.deepcopy(CONFIG) | {"intermediate_size": 2 * CONFIG["intermediate_size"]}
        drafter, complaint = save_head(tmp_path / "head", other, random_tensors(other)), "another draft head: "
    else:
        (copied / DRAFT_FOLDER / "manifest.json").unlink()
        drafter, complaint = drafters[method], f"{DRAFT_FOLDER}: there are no programs with a manifest"
    given = options | SMALL | {"speculative_config": config_of(method, drafter)}
    with pytest.raises(ConfigError, match=complaint):
        start(EngineConfig(**given, programs_dir=str(copied)))
