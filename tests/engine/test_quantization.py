"""Weights and activations in 8 bits, through the engine."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from noria import LLM, SamplingParams
from noria.errors import ConfigError
from noria.ops import native
from noria.runner.memory import MemoryPlan
from noria.runner.runner import ModelRunner

MODEL = Path(__file__).resolve().parents[1] / "golden" / "models" / "llama"
PROMPTS = [[1, 17, 42, 99, 5, 80], [3], list(range(40, 70))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
XLA = {"linear_backend": "xla", "attention_backend": "xla"}
ROUNDED = {"quantization": "int8", "quantize_activations": True}
needs_library = pytest.mark.skipif(not native.available(), reason=f"native library {native.status()}")


def engine(compile_cache_dir: str, **options) -> LLM:
    return LLM(
        str(MODEL),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_blocks_override=40,
        strict_compile=True,
        compile_cache_dir=compile_cache_dir,
        **options,
    )


Answers = Callable[..., tuple[list[list[int]], int]]


@pytest.fixture(scope="module")
def answers(compile_cache_dir: str) -> Answers:
    """Of an engine with these options: token ids, and bytes of the weights. Each is asked once."""
    return functools.cache(functools.partial(_answers, compile_cache_dir))


def _answers(compile_cache_dir: str, **options) -> tuple[list[list[int]], int]:
    with engine(compile_cache_dir, **options) as llm:
        tokens = [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, GREEDY)]
        alone = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in PROMPTS]
        assert tokens == alone
        return tokens, llm.stats.startup.memory.weights


@pytest.mark.slow
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_8_bit_weights_on_xla(load_format: str, answers: Answers):
    tokens, size = answers(load_format=load_format, quantization="int8", **XLA)
    assert size < 0.4 * (MODEL / "model.safetensors").stat().st_size  # which is float32
    if native.available():  # the same integers and scales
        assert tokens == answers(load_format=load_format, quantization="int8")[0]


@needs_library
def test_8_bit_activations(answers: Answers):
    tokens, size = answers(**ROUNDED)
    assert size == answers(load_format="auto", quantization="int8")[1]
    assert all(len(set(ids)) > 1 for ids in tokens)


def test_rounding_without_the_native_op_is_refused(compile_cache_dir):
    with pytest.raises(
        ConfigError, match="quantize_activations needs the native linear op, and linear_backend is xla; leave it out"
    ):
        engine(compile_cache_dir, **ROUNDED, **XLA)


@needs_library
def test_rounding_that_would_change_nothing_is_refused(compile_cache_dir):
    with pytest.raises(ConfigError, match=r"quantize_activations would change nothing.*add quantization int8"):
        engine(compile_cache_dir, quantize_activations=True)


def test_whether_it_fits_is_asked_of_what_will_be_loaded(compile_cache_dir, monkeypatch: pytest.MonkeyPatch):
    """Before anything is read, and yet not of float32: a packed model may be several times smaller."""
    plans: list[MemoryPlan] = []
    profile_run = ModelRunner.profile_run

    def noted(runner: ModelRunner, available: int | None = None) -> MemoryPlan:
        plans.append(profile_run(runner, available))
        return plans[-1]

    monkeypatch.setattr(ModelRunner, "profile_run", noted)
    with engine(compile_cache_dir, quantization="int8", **XLA) as llm:
        assert [plan.weights for plan in plans] == [llm.stats.startup.memory.weights] * 2
