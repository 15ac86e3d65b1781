"""noria compile: a later start finds every program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome

from noria.runner.runner import ModelRunner

Noria = Callable[..., Outcome]
SIZES = ("--max-model-len", "96", "--max-num-batched-tokens", "16")


@pytest.fixture
def reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """While noria compile runs; the function ends it."""
    original = ModelRunner.load_model
    monkeypatch.setattr(ModelRunner, "load_model", lambda *_: pytest.fail("the weights were read"))
    return lambda: monkeypatch.setattr(ModelRunner, "load_model", original)


def test_a_later_run_compiles_nothing(
    noria: Noria, plain_model: str, tmp_path: Path, reads_no_weights: Callable[[], None]
) -> None:
    args = (plain_model, *SIZES, "--compile-cache-dir", str(tmp_path / "programs"))
    first = noria("compile", *args, "--json")
    assert first.status == 0, first.err
    figures = json.loads(first.out)
    assert figures["programs"] == figures["compiled"] == 7
    assert figures["seconds"] > 0
    again = noria("compile", *args)
    assert again.out.startswith("7 programs in ")
    assert again.out.endswith(", 0 compiled\n")
    assert "KV cache" in again.err
    reads_no_weights()
    run = noria("run", *args, "-p", "wheel", "--max-tokens", "4", "--json")
    assert json.loads(run.out)["stats"]["programs_compiled"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--compile-cache-dir", ""], 'compile_cache_dir "" turns the compile cache off'),
        (["--max-num-seq", "3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["--max-model-len", "100000"], "max_model_len (100000) exceeds"),
        (["--programs-dir", "d"], "programs_dir: here programs are compiled, not fetched; leave it out"),
        (["--topology", "v6e:1x1"], "--topology and --out belong together"),
        (["--topology", "v6e:1x1", "--out", "d", "--compile-cache-dir", "c"], "compile_cache_dir: the programs go to"),
        (
            ["--topology", "v6e:1x1", "--out", "d", "--nnodes", "2"],
            "nnodes: programs are compiled into a folder for one",
        ),
        (["--programs-dir", "d", "--nnodes", "2"], "programs_dir: programs in a folder are for one host"),
        (["--out", "d"], "--topology and --out belong together"),
        (["--topology", "v6e:1x1", "--out", "d", "--device", "cpu"], "device cpu: --topology names TPUs"),
        (["--topology", "v9:1x1", "--out", "d"], "topology v9:1x1: the chip v9 is not known"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(noria: Noria, plain_model: str, args: list[str], message: str) -> None:
    outcome = noria("compile", plain_model, *args)
    assert message in outcome.error()
    assert "compiling" not in outcome.err


def test_a_model_that_is_not_there(noria: Noria) -> None:
    assert "no model 'no-such-model'" in noria("compile", "no-such-model").error()
    assert "MODEL is missing" in noria("compile").error()
