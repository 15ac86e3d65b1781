"""The build of the native ops: it explains what is wrong, and never fails the install of the package."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load(ROOT / "native" / "build.py")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that refuses everything."""
    program = tmp_path / "broken-c++"
    program.write_text(
        "#!/bin/sh\necho 'a.cc:1: note: something' >&2\necho 'a.cc:2: error: no such flag' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return program


def install(root: Path, build_data: dict) -> Path:
    """What the package's build does, in a copy of the checkout; returns the folder of the library."""
    pytest.importorskip("hatchling")
    shutil.copytree(ROOT / "native", root / "native")
    hook = load(ROOT / "hatch_build.py").NativeOps(str(root), {}, None, None, "", "wheel")
    hook.initialize("standard", build_data)
    return root / "src" / "noria" / "ops" / "_native"


def test_a_missing_compiler_is_named(build, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert build.find_compiler() is None
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build_library(tmp_path / "out.so", tmp_path)


def test_the_compilers_own_words_are_kept(build, tmp_path, compiler):
    with pytest.raises(build.BuildError, match=r"^broken-c\+\+ failed: a.cc:2: error: no such flag$"):
        build.build_library(tmp_path / "out.so", tmp_path)
    assert not (tmp_path / "out.so").exists()


def test_a_failed_build_does_not_fail_the_install(tmp_path, compiler, capsys):
    stale = tmp_path / "src" / "noria" / "ops" / "_native" / "libnoria_ops.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an earlier build")
    data = {"artifacts": [], "pure_python": True}
    folder = install(tmp_path, data)
    assert (folder / "not_built.txt").read_text() == "broken-c++ failed: a.cc:2: error: no such flag\n"
    assert not stale.exists()
    assert data["pure_python"]
    assert "not built: broken-c++ failed" in capsys.readouterr().err


def test_native_ops_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("NORIA_NATIVE", "0")
    folder = install(tmp_path, {"artifacts": []})
    assert (folder / "not_built.txt").read_text().startswith("NORIA_NATIVE=0")


@pytest.mark.slow
def test_random_shapes_under_sanitizers(build, tmp_path):
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    try:
        build.build_fuzz(tmp_path / "fuzz")
    except build.BuildError as error:
        pytest.skip(f"no sanitizers: {error}")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([tmp_path / "fuzz", "1000"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "1000 random products, batches and choices agree on portable" in done.stdout


def test_the_builder_needs_nothing_but_the_standard_library():
    """The package's build runs it where nothing else is installed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "native" / "build.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
