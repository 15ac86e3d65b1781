"""What is wrong is said in one line that names it, with the right exit status and before anything is compiled."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from command_line import Outcome

Noria = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "m", "--topk", "3"], "unknown option --topk; did you mean --top-k?"),
        (["run", "m", "-p", "x", "--max_modellen=3"], "unknown option --max_modellen; did you mean --max-model-len?"),
        (["run", "m", "--no-enable-prefix-cache"], "unknown option --no-enable-prefix-cache; did you mean --no-"),
        (["run", "m", "--model", "x"], "unknown option --model; it is an argument, as in noria run MODEL"),
        (["serve", "--model=x"], "unknown option --model; it is an argument, as in noria serve MODEL"),
        (["batch", "-i", "a", "-o", "b", "--model", "m"], "INPUT must not begin with -"),
        (["run", "m", "-p", "x", "--logprobs", "2"], "--logprobs is shown with --json only"),
        (["run", "m", "-p", "x", "--prompt-logprobs", "0"], "--prompt-logprobs is shown with --json only"),
        (["run", "m", "-p", "x", "--json", "--logprobs", "21"], "--logprobs (21) exceeds --max-logprobs (20)"),
        (["chat", "m", "--n", "2"], "unknown option --n"),
        (["run", "m", "-p", "x", "--top-k", "many"], "--top-k: expected an integer, not 'many'"),
        (["run", "m", "-p", "x", "--max-model-len", "1.5"], "--max-model-len: expected an integer, not '1.5'"),
        (["run", "m", "-p", "x", "--temperature", "hot"], "--temperature: expected a number, not 'hot'"),
        (["run", "m", "-p", "x", "--stop-token-ids", "a"], "--stop-token-ids: expected an integer, not 'a'"),
        (["run", "m", "-p", "x", "--kv-cache-dtype", "int3"], "--kv-cache-dtype: expected one of 'auto', 'float32'"),
        (["run", "m", "-p"], "--prompt needs a value"),
        (["run", "m", "-p", "-x"], "--prompt needs a value (write --prompt=-x"),
        (["run", "m"], "the prompt is missing"),
        (["run", "-p", "x"], "MODEL is missing"),
        (["run", "m", "-p", "x", "extra"], "unexpected argument 'extra': --prompt is there already"),
        (["run", "m", "x", "extra"], "unexpected argument 'extra'"),
        (["pull"], "NAME is missing"),
        (["run", "m", "-p", "x", "--logit-bias", "3"], "--logit-bias must be a token id and a number, as in 17=-2.5"),
        (["rnu"], "unknown command rnu; did you mean run?"),
        (
            ["everything"],
            "unknown command everything; commands: run, chat, serve, batch, compile, plan, bench, pull, env",
        ),
    ],
)
def test_a_wrong_command_line(noria: Noria, args: list[str], message: str) -> None:
    outcome = noria(*args)
    assert outcome.error().startswith(message)
    assert outcome.status == 2
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--top-p", "0"], "top_p must be in (0, 1]"),
        (["--min-tokens", "200"], "min_tokens (200) must not exceed max_tokens (128)"),
        (["--stop", ""], "stop must not contain an empty string"),
        (["--presence-penalty", "3"], "presence_penalty must be in [-2, 2]"),
        (["--logit-bias", "3=101"], "logit_bias: the bias of token 3 must be in [-100, 100]"),
        (["--max-logprobs=-1"], "max_logprobs must be at least 0"),
        (["--max-model-len", "0"], "max_model_len must be at least 1"),
        (["--memory-utilization", "1.5"], "memory_utilization must be in (0, 1]"),
    ],
)
def test_a_value_out_of_range(noria: Noria, args: list[str], message: str) -> None:
    outcome = noria("run", "no-such-model", "-p", "x", *args)  # found before the model is looked for
    assert message in outcome.error()
    assert outcome.status == 1


def test_every_engine_and_sampling_option_reaches_its_dataclass(monkeypatch: pytest.MonkeyPatch, noria: Noria) -> None:
    """Values go where they belong: each is out of range and refused under its own name."""
    for option in ("block-size", "num-blocks-override", "kv-cache-memory-bytes", "compile-threads", "max-num-seqs"):
        assert f"{option.replace('-', '_')} must be" in noria("run", "m", "-p", "x", f"--{option}", "0").error()
    for option, value in (("n", "0"), ("min-p", "2"), ("top-k", "-2"), ("seed", str(2**64)), ("temperature", "-1")):
        assert re.match(f"{option.replace('-', '_')} must", noria("run", "m", "-p", "x", f"--{option}", value).error())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-blocks-override", "3"], "raise num_blocks_override"),
        (["--max-num-batched-tokens", "4"], "max_num_batched_tokens (4) must be at least max_num_seqs (8)"),
        (["--max-model-len", "100000"], "max_model_len (100000) exceeds"),
    ],
)
def test_sizes_that_do_not_fit(noria: Noria, plain_model: str, small: list[str], args: list[str], message: str) -> None:
    outcome = noria("run", plain_model, "-p", "x", *small, *args)
    assert message in outcome.error()
    assert "compiling" not in outcome.err


def test_prompts_that_cannot_be_served(
    noria: Noria, plain_model: str, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = noria("run", plain_model, "-p", "z" * 300, *small)
    assert re.search(r"the prompt has \d+ tokens, but max_model_len \(96\)", outcome.error())
    assert "compiling" not in outcome.err
    assert "the prompt is empty" in noria("run", plain_model, "-p", "").error()
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "the prompt is empty" in noria("run", plain_model, "-p", "-").error()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    assert "stdin is not utf-8 text" in noria("run", plain_model, "-p", "-").error()


def test_a_prompt_that_the_template_makes_too_long(noria: Noria, chat_model: str, small: list[str]) -> None:
    """Only the engine can tell: by itself the prompt would fit."""
    outcome = noria("run", chat_model, "-p", "z" * 90, *small)
    assert "max_model_len (96)" in outcome.error()
    assert "compiling" in outcome.err


def test_models_that_are_not_there(noria: Noria, tmp_path: Path) -> None:
    assert "no model 'no-such-model'" in noria("run", "no-such-model", "-p", "x").error()
    assert "no model" in noria("pull", "./missing.gguf").error()
    assert "no model" in noria("chat", str(tmp_path / "missing.gguf")).error()


def test_weights_that_are_missing_or_cut_off(noria: Noria, plain_model: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(plain_model, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    outcome = noria("run", str(broken), "-p", "x")
    assert "model.safetensors" in outcome.error()
    weights.unlink()
    assert str(broken) in noria("run", str(broken), "-p", "x").error()
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    shutil.copyfile(Path(plain_model) / "model.safetensors", weights)
    assert "MambaForCausalLM" in noria("run", str(broken), "-p", "x").error()


def test_gguf_of_an_unsupported_architecture(noria: Noria, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    outcome = noria("run", str(path), "-p", "x")
    assert "rwkv7" in outcome.error()
    assert outcome.status == 1


def test_ctrl_c_ends_with_130(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("noria.cli.run.fetch", interrupted)
    assert noria("run", "m", "-p", "x") == Outcome(130, "", "")
