"""noria serve: what its command line refuses before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from command_line import Outcome

from noria.server.settings import ServerConfig

Noria = Callable[..., Outcome]


def test_every_option_of_the_server_is_offered(noria: Noria) -> None:
    shown = noria("serve", "--help").out
    for name in (*ServerConfig.__dataclass_fields__, "max_num_seqs", "seed", "scheduling_policy"):
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port must be 0 to 65535, not 70000"),
        (["--api-key", ""], "api_key must not be empty"),
        (["--engine-timeout", "0"], "engine_timeout must be positive, not 0.0"),
        (["--on-engine-death", "weep"], "--on-engine-death: expected one of 'restart', 'exit', not 'weep'"),
        (["--temperature", "1"], "unknown option --temperature"),
        (["--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
    ],
)
def test_a_wrong_command_line(noria: Noria, options: list[str], message: str) -> None:
    assert noria("serve", "no-such-model", *options).error().startswith(message)


def test_a_model_that_is_not_there(noria: Noria) -> None:
    assert "no model 'no-such-model'" in noria("serve", "no-such-model").error()


def test_nobody_else_needs_the_packages_of_the_server() -> None:
    code = (
        "import sys, noria, noria.cli.run, noria.cli.serve, noria.engine.llm, noria.engine.async_llm\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'zmq', 'msgspec', 'prometheus_client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
