"""The repository itself: nothing in it belongs to one machine, and its documents speak of what is there."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Host names of package registries: a mirror or an offline wheel folder must be able to stand in for each of them.
# Put together from parts, so that this file does not contain what it looks for.
REGISTRY_HOSTS = tuple(
    f"{name}.{domain}"
    for name, domain in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("debian", "org"),
    )
)
# Folders of one machine; a test takes tmp_path, a document a name of its own.
LOCAL_PATHS = tuple("/" + name + "/" for name in ("work", "tmp", "root"))
UNFINISHED = tuple(first + second for first, second in (("TO", "DO"), ("FIX", "ME")))
TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cfg", ""})
LARGEST_FILE = 4 << 20  # bytes


def git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if result.returncode:
        pytest.skip("not a git checkout")
    return result.stdout


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """Every tracked file, and every new one that is not ignored."""
    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
        pytest.skip("not a git checkout")
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    found = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in found
    return found


def local_paths_in(text: str) -> list[str]:
    """Absolute paths below LOCAL_PATHS, and the folder beside the checkout; not the middle of a longer path."""
    names = "|".join(map(re.escape, LOCAL_PATHS))
    return re.findall(rf"(?<![\w.\-])(?:{names})", text) + re.findall(re.escape("../" + "shared"), text)


def test_no_registry_host_is_named(files: list[Path]) -> None:
    found = [
        f"{file.relative_to(ROOT)} names {host}"
        for file in files
        for host in REGISTRY_HOSTS
        if host.encode() in file.read_bytes().lower()
    ]
    assert not found, "\n".join(found)


def test_no_path_of_one_machine_is_named(files: list[Path]) -> None:
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    assert len(texts) > 10
    found = {str(file.relative_to(ROOT)): local_paths_in(file.read_text("utf-8")) for file in texts}
    assert not any(found.values()), {name: paths for name, paths in found.items() if paths}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("open('" + LOCAL_PATHS[0] + "main/x')", 1),
        ("see " + LOCAL_PATHS[1] + "a and " + LOCAL_PATHS[2] + "b", 2),
        ("[spec](../" + "shared/spec.md)", 1),
        ("src" + LOCAL_PATHS[0] + "x, a network" + "/tmpl/, tmp_path", 0),
    ],
)
def test_local_paths_are_recognised(text: str, count: int) -> None:
    assert len(local_paths_in(text)) == count


def test_nothing_is_marked_as_unfinished(files: list[Path]) -> None:
    sources = [file for file in files if file.suffix == ".py"]
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sources
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if any(re.search(rf"\b{mark}\b", line) for mark in UNFINISHED)
    ]
    assert not found, "\n".join(found)


def test_no_file_is_large(files: list[Path]) -> None:
    large = {str(file.relative_to(ROOT)): file.stat().st_size for file in files if file.stat().st_size > LARGEST_FILE}
    assert not large


def test_no_two_test_modules_share_a_name() -> None:
    """pytest puts each folder of tests on the path, so that of two modules with one name the wrong one may be found."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))


# --------------------------------------------------------------------------------------------------- documents


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def test_targets_that_are_promised() -> None:
    assert {"demo", "test", "test-all", "lint", "format"} <= make_targets()


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_make_targets_in_documents_exist(document: Path) -> None:
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z][a-z-]*)", document.read_text("utf-8"), re.MULTILINE))
    assert named <= make_targets()


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text("utf-8"))
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_architecture_names_every_room_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    described = set(re.findall(r"^\| `([a-z_]+)/` \|", text, re.MULTILINE))
    rooms = {init.parent.name for init in (ROOT / "src" / "noria").glob("*/__init__.py")}
    assert described == rooms


def test_architecture_names_every_import_contract() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = [contract["name"] for contract in config["tool"]["importlinter"]["contracts"]]
    assert contracts
    assert [name for name in contracts if name not in text] == []


def test_ci_script_is_executable_and_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_license_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
