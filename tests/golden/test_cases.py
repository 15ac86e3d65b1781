"""The golden values must be whole and consistent before an engine is measured by them."""

import json

import numpy as np
import pytest
from cases import ModelCase, RealCase, model_cases, real_cases
from safetensors import safe_open


def test_every_family_and_format_is_there():
    configs = {case.name: json.loads((case.folder / "config.json").read_text()) for case in model_cases()}
    assert {config["model_type"] for config in configs.values()} == {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "gemma3_text",
    }
    assert any("rope_parameters" in config for config in configs.values())
    assert any("rope_theta" in config and config.get("rope_scaling") for config in configs.values())
    assert any((case.folder / "model.safetensors.index.json").exists() for case in model_cases())
    assert {case.stored_dtype for case in model_cases()} == {"float32", "bfloat16"}
    assert [case.name for case in real_cases()] == ["gemma-3-270m", "smollm2-135m-instruct"]


@pytest.mark.parametrize("case", model_cases(), ids=str)
def test_model_folder_and_values_agree(case: ModelCase):
    config = json.loads((case.folder / "config.json").read_text())
    dtypes = set()
    for path in case.folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes == {{"float32": "F32", "bfloat16": "BF16"}[case.stored_dtype]}
    assert [prompt.name for prompt in case.prompts] == ["short", "medium", "long"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    assert len(case.prompts[-1].token_ids) > 2 * (window or 0)
    for prompt in case.prompts:
        assert len(prompt.continuation.token_ids) == len(prompt.continuation.gaps) == 32
        assert max(prompt.token_ids + prompt.continuation.token_ids) < config["vocab_size"]
        assert min(prompt.continuation.gaps) > 1e-3
        if prompt.logits is not None:
            assert prompt.logits.dtype == np.float32
            assert prompt.logits.shape == (len(prompt.token_ids), config["vocab_size"])
            second, best = np.sort(prompt.logits[-1])[-2:]
            assert prompt.logits[-1].argmax() == prompt.continuation.token_ids[0]
            assert best - second == pytest.approx(prompt.continuation.gaps[0], abs=1e-4)
    assert sum(prompt.logits is not None for prompt in case.prompts) >= 2


@pytest.mark.parametrize("case", real_cases(), ids=str)
def test_two_programs_in_float32_say_the_same(case: RealCase):
    assert len(case.prompts) == 5
    for prompt in case.prompts:
        assert prompt.float32.token_ids == prompt.llama_cpp_float32.token_ids, prompt.name
        np.testing.assert_allclose(prompt.float32.gaps, prompt.llama_cpp_float32.gaps, atol=0.02)
        assert min(prompt.float32.gaps) > 0.01


@pytest.mark.parametrize("case", real_cases(), ids=str)
def test_eight_bit_activations_leave_only_for_the_runner_up(case: RealCase):
    for prompt in case.prompts:
        pairs = enumerate(zip(prompt.llama_cpp.token_ids, prompt.float32.token_ids, strict=True))
        first = next((index for index, (ours, truth) in pairs if ours != truth), None)
        if first is not None:
            assert prompt.llama_cpp.token_ids[first] == prompt.float32.runners_up[first], prompt.name
            assert prompt.float32.gaps[first] < 0.5, prompt.name
