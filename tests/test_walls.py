"""The walls between the rooms (docs/architecture.md): they stand, and each check falls when a break is planted.

Imports are checked by import-linter with the contracts in pyproject.toml; what it cannot see is read from the syntax
trees here.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "noria"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
PLAIN_ROOMS = (  # never import jax
    *("config", "checks", "errors", "engine.request", "engine.client", "engine.structured"),
    *("server", "bench", "scheduler", "cache", "text", "grammar"),
)

# ---------------------------------------------------------------------------------------------- import contracts


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    """import-linter in its own process on the package `source`/noria; an editable install must not be found first."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def verdict(output: str, contract: str) -> str:
    found = re.search(rf"^{re.escape(contract)} (KEPT|BROKEN)", output, re.MULTILINE)
    assert found, f"no verdict on {contract!r} in:\n{output}"
    return found.group(1)


@pytest.fixture
def copy_of_source(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))


def test_import_contracts_hold() -> None:
    result = lint_imports(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BROKEN" not in result.stdout


@pytest.mark.parametrize(
    ("room", "line", "contract"),
    [
        ("scheduler", "import jax", "plain rooms never import jax"),
        ("cache", "from noria.nn.param import Param", "plain rooms never import jax"),  # through another module
        ("text", "def late():\n    import jaxlib", "plain rooms never import jax"),  # when called
        ("server", "from noria.nn.param import Param", "plain rooms never import jax"),
        ("bench", "from noria.nn.param import Param", "plain rooms never import jax"),
        ("bench", "import noria.server.app", "rooms are layered"),  # it measures any server, from outside
        ("server", "import noria.engine.core", "the server talks to the engine through its async front only"),
        ("server", "import noria.scheduler", "the server talks to the engine through its async front only"),
        ("engine", "import noria.server", "rooms are layered"),
        ("nn", "import noria.engine.request", "models and nn know nothing of requests, schedules or sampling"),
        (
            "models",
            "from noria.scheduler import schedule",
            "models and nn know nothing of requests, schedules or sampling",
        ),
        ("ops", "from noria.nn import param", "ops know nothing of nn"),
        ("weights", "import noria.models", "weights know declarations, not models"),
        ("runner", "import noria.engine.request", "the runner obeys schedules and does not make them"),
        ("batch", "import noria.text", "the runner obeys schedules and does not make them"),
        ("scheduler", "import noria.engine", "rooms are layered"),
        ("observe", "import noria.cli", "rooms are layered"),
        (".", "", "rooms are layered"),  # a new room must be given its place
    ],
)
def test_a_planted_import_breaks_its_contract(copy_of_source: Path, room: str, line: str, contract: str) -> None:
    (copy_of_source / "noria" / room / "planted.py").write_text(f"{line}\n")
    result = lint_imports(copy_of_source)
    assert result.returncode == 1, result.stdout + result.stderr
    assert verdict(result.stdout, contract) == "BROKEN"
    assert "planted" in result.stdout


def test_a_request_that_imports_its_engine_breaks_its_contract(copy_of_source: Path) -> None:
    path = copy_of_source / "noria" / "engine" / "request.py"
    path.write_text(path.read_text() + "\nimport noria.scheduler\n")
    assert verdict(lint_imports(copy_of_source).stdout, "a request knows nobody") == "BROKEN"


def modules_of(room: str) -> list[str]:
    path = PACKAGE.joinpath(*room.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]


def test_plain_rooms_run_without_jax() -> None:
    """What import-linter does not count: importing a module also runs the __init__ of every package above it."""
    modules = [module for room in PLAIN_ROOMS for module in modules_of(room)]
    program = f"""
        import importlib, sys
        for name in {modules}:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name == "ray", error  # the one extra that is too large for the tests
            assert not {{"jax", "jaxlib"}} & set(sys.modules), f"importing {{name}} loads jax"
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------- walls that are seen in the syntax tree only

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
# fmt: off
STATEFUL_CALLS = frozenset((
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap", "cycle",
    "Lock", "RLock", "Condition", "Event", "Semaphore", "Queue", "SimpleQueue", "ContextVar", "default_rng",
    "WeakValueDictionary", "WeakKeyDictionary", "WeakSet", "SimpleNamespace",
))
# fmt: on
# Calls whose result is a function, a type or a logger: nothing a program would keep its state in.
HARMLESS_CALLS = frozenset(
    ("getLogger", "jit", "partial", "vmap", "custom_vjp", "itemgetter", "attrgetter", "NewType", "TypeVar")
)
READ_ONLY_TYPES = ("Mapping", "Sequence")  # the type checker then refuses to change the value


def name_of_call(node: ast.expr | None) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_read_only(statement: ast.stmt) -> bool:
    """Whether the name is declared as `NAME: Mapping[...]` or `NAME: Sequence[...]`."""
    match statement:
        case ast.AnnAssign(annotation=ast.Subscript(value=ast.Name(id=name))):
            return name in READ_ONLY_TYPES
    return False


def long_lived_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run once at import: of the module, of its classes, and inside if, try, with and loops there."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from long_lived_statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from long_lived_statements(handler.body)


def module_level_state(tree: ast.Module) -> Iterator[str]:
    for statement in long_lived_statements(tree.body):
        match statement:
            case ast.Assign(targets=targets, value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
            ):
                names = [name]
            case _:
                continue
        call = name_of_call(value)
        for name in names:
            if name.startswith("__") and name.endswith("__"):
                continue  # __all__ and its like are the language's
            if isinstance(statement, ast.AugAssign) or call in STATEFUL_CALLS:
                yield f"{statement.lineno}: {name} is mutable; let an owner hold and pass it"
            elif isinstance(value, MUTABLE_DISPLAYS) and not (name == name.upper() and is_read_only(statement)):
                yield f"{statement.lineno}: {name} is mutable; use a tuple, a frozenset or {name}: Mapping[...]"
            elif name == name.lower() and call not in HARMLESS_CALLS | {None} and statement in tree.body:
                yield f"{statement.lineno}: {name} = {call}(...) is state of the module; let its owner hold and pass it"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def reads_of_environment(tree: ast.Module) -> Iterator[str]:
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = {node.attr} & words if node.value.id == "os" else set()
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {alias.name for alias in node.names} & words
        else:
            continue
        for name in used:
            yield f"{node.lineno}: os.{name} is used outside config.py and cli/"


def length_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of code from `def` to the end: without docstring, blank lines and comments."""
    first, last = node.lineno, node.end_lineno or node.lineno
    docstring: range | tuple[()] = ()
    if ast.get_docstring(node, clean=False) is not None:
        docstring = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    code = (lines[n - 1].strip() for n in range(first, last + 1) if n not in docstring)
    return sum(1 for line in code if line and not line.startswith("#"))


def long_functions(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = length_of_function(node, lines)
            if length > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {length} lines of code, more than {MAX_FUNCTION_LINES}"


def managers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "manager" in node.name.lower():
            yield f"{node.lineno}: class {node.name}: name what it owns instead"


def breaks(file: str, source: str) -> list[str]:
    """Every break of a wall in one file; `file` is its path inside the package."""
    tree, lines = ast.parse(source), source.splitlines()
    found = [*module_level_state(tree), *long_functions(tree, lines), *managers(tree)]
    if file != "config.py" and not file.startswith("cli/"):
        found += reads_of_environment(tree)
    if len(lines) > MAX_FILE_LINES:
        found.append(f"1: {len(lines)} lines, more than {MAX_FILE_LINES}; split it by what it does")
    return [f"src/noria/{file}:{text}" for text in found]


def test_walls_in_the_code_hold() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    found = [text for file in files for text in breaks(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


LONG_BODY = "\n".join(f"    x{n} = {n}" for n in range(MAX_FUNCTION_LINES))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("seen = []", "seen is mutable"),
        ("FAMILIES = {}", "FAMILIES is mutable"),
        ("FAMILIES: dict[str, int] = {'a': 1}", "FAMILIES is mutable"),
        ("families: Mapping[str, int] = {'a': 1}", "families is mutable"),
        ("KNOWN = set()", "KNOWN is mutable"),
        ("from collections import deque\n_QUEUE = deque(maxlen=3)", "_QUEUE is mutable"),
        ("if True:\n    try:\n        x = 1\n    except ValueError:\n        LATE = [1]", "LATE is mutable"),
        ("class Engine:\n    requests = {}", "requests is mutable"),
        ("counter = 0\ncounter += 1", "counter is mutable"),
        ("import noria\nengine = noria.Engine()", "engine = Engine(...) is state of the module"),
        ("import threading\n_LOCK = threading.Lock()", "_LOCK is mutable"),
        ("x = 0\ndef f():\n    global x\n    x = 1", "global x"),
        ("import os\nhome = os.environ['HOME']", "os.environ"),
        ("import os\ndef f():\n    return os.getenv('HOME')", "os.getenv"),
        ("from os import environ", "os.environ"),
        ("class CacheManager:\n    pass", "class CacheManager"),
        ("class A:\n    class _KVmanagerBase:\n        pass", "class _KVmanagerBase"),
        (f"def f():\n{LONG_BODY}", "f has 61 lines of code"),
        (f"class A:\n  async def f(self):\n{LONG_BODY}", "f has 61 lines of code"),
        ("x = 1\n" * (MAX_FILE_LINES + 1), "401 lines"),
    ],
)
def test_a_planted_break_is_seen(source: str, message: str) -> None:
    found = breaks("engine/planted.py", source)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "__all__ = ['LLM']",
        "SIZES = (1, 2)\nNAMES = frozenset({'a'})\nlimit = 3",
        "from types import MappingProxyType\nFAMILIES = MappingProxyType({'llama': 1})",
        "from collections.abc import Mapping\nFAMILIES: Mapping[str, int] = {'llama': 1}",
        "import logging\nlogger = logging.getLogger(__name__)",
        "import jax\nforward = jax.jit(lambda x: x)",
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n    ids: list = field(default_factory=list)",
        "def f():\n    seen = []\n    return seen",
        f'def f():\n    """Long.\n\n{"text" * 9}\n    """\n    # a comment\n\n{LONG_BODY.rpartition(chr(10))[0]}',
    ],
)
def test_what_the_walls_allow(source: str) -> None:
    assert breaks("engine/planted.py", source) == []


@pytest.mark.parametrize("file", ["config.py", "cli/run.py"])
def test_environment_may_be_read_where_options_are_made(file: str) -> None:
    assert breaks(file, "import os\nHOME = os.environ.get('NORIA_HOME')") == []
