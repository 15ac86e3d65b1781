"""Models and heads that draft on several devices: answers are those of one device without drafts, and the drafts those
of one device. Whole engines in a process that has eight CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting import NARROW, make_head, narrow_model, with_drafts
from test_data_parallel import ALL_AXES, ATTENTION_2, DATA_2, DATA_2_TENSOR_2, check
from test_tensor_parallel import GOLDEN, on_eight_devices

WORKER = Path(__file__).with_name("drafts_worker.py")
TENSOR_4 = {"tensor_parallel_size": 4, "device_order": [5, 2, 0, 7]}
NOT_AHEAD = {"async_scheduling": False}
SMALL_POOL = {"num_blocks_override": 14}
COPIES_OF_THE_MODEL = {"small": DATA_2 | SMALL_POOL, "not ahead": DATA_2_TENSOR_2 | NOT_AHEAD}
SHARED_MODELS = {"small": ATTENTION_2 | SMALL_POOL, "all": ALL_AXES}


def run(
    model: Path, drafts: dict[str, Any], meshes: dict[str, dict[str, Any]], cache: str, speaks: bool = True
) -> dict[str, Any]:
    """Of one device without drafts, of one with, and of the others with. All answers are those of the first."""
    engines = {"one": {}, "drafting": drafts, **{name: drafts | mesh for name, mesh in meshes.items()}}
    job = {"model": str(model), "engines": engines, "speaks": speaks, "few": False, "compile_cache_dir": cache}
    found = on_eight_devices(WORKER, job)
    check({name: each["answers"] for name, each in found.items()})
    del found["one"]
    print({name: {key: value for key, value in each.items() if key != "answers"} for name, each in found.items()})
    for each in found.values():
        assert each["accepted"] > 20
        assert each["known"] > 50
        assert each["different"] <= each["known"] / 200  # by another order of sums, as answers could be
    return found


@pytest.fixture(scope="module")
def narrow(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return narrow_model(tiny_text_model, tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module", params=[{}, NARROW], ids=["divides", "narrow"])
def head(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_head(tiny_text_model, tmp_path_factory.mktemp("heads") / "head", **request.param)


@pytest.mark.slow
def test_a_draft_model_split_like_the_model(tiny_text_model: Path, compile_cache_dir: str) -> None:
    """The model itself: nearly every draft is right."""
    meshes = {"two": {"tensor_parallel_size": 2}, "four": TENSOR_4 | NOT_AHEAD}
    found = run(tiny_text_model, with_drafts("draft_model", tiny_text_model), meshes, compile_cache_dir)
    for each in found.values():
        assert each["accepted"] > 0.8 * each["drafts"]


@pytest.mark.slow
def test_a_draft_model_with_fewer_heads(tiny_text_model: Path, narrow: Path, compile_cache_dir: str) -> None:
    meshes = {"four": TENSOR_4, "small": TENSOR_4 | SMALL_POOL}
    found = run(tiny_text_model, with_drafts("draft_model", narrow), meshes, compile_cache_dir)
    assert found["small"]["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [COPIES_OF_THE_MODEL, SHARED_MODELS], ids=["data", "attention-data"])
def test_a_draft_model_on_ranks(
    meshes: dict[str, Any], tiny_text_model: Path, narrow: Path, compile_cache_dir: str
) -> None:
    found = run(tiny_text_model, with_drafts("draft_model", narrow), meshes, compile_cache_dir)
    assert found["small"]["preemptions"] > 0


@pytest.mark.slow
def test_a_head_on_several_devices(tiny_text_model: Path, head: Path, compile_cache_dir: str) -> None:
    meshes = {"two": {"tensor_parallel_size": 2} | NOT_AHEAD, "four": TENSOR_4, "small": TENSOR_4 | SMALL_POOL}
    found = run(tiny_text_model, with_drafts("eagle3", head), meshes, compile_cache_dir)
    assert found["small"]["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [COPIES_OF_THE_MODEL, SHARED_MODELS], ids=["data", "attention-data"])
def test_a_head_on_ranks(meshes: dict[str, Any], tiny_text_model: Path, head: Path, compile_cache_dir: str) -> None:
    found = run(tiny_text_model, with_drafts("eagle3", head), meshes, compile_cache_dir)
    assert found["small"]["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_model_with_experts(method: str, tmp_path: Path, compile_cache_dir: str) -> None:
    """What drafts has no use for the axis that experts are divided along."""
    mixtral = GOLDEN / "mixtral"
    drafts = with_drafts(method, mixtral if method == "draft_model" else make_head(mixtral, tmp_path / "head"))
    meshes = {
        "experts": {"expert_parallel_size": 2, "tensor_parallel_size": 2},
        "all": {**DATA_2, **ATTENTION_2, "expert_parallel_size": 2},
    }
    run(mixtral, drafts, meshes, compile_cache_dir, speaks=False)
