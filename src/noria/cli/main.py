"""The command `noria`: finds the command that is asked for and turns whatever happens into an exit status.

0: done; 1: a NoriaError; 2: wrong usage; 130: interrupted; 141: whoever read the output went away.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from noria import __version__
from noria.errors import NoriaError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "answer one prompt",
        "chat": "talk with a model",
        "serve": "answer over HTTP with OpenAI's API",
        "batch": "answer the requests in a file",
        "compile": "compile what a model needs, for quick starts later",
        "plan": "compile for TPUs without one, and say what will fit and how fast",
        "bench": "measure this machine and a model on it",
        "pull": "fetch a model and say where it is",
        "env": "show versions, devices and folders, for a bug report",
    }
)


class UsageError(NoriaError):
    """The command line itself is wrong."""


class Done(Exception):
    """There is nothing else to do: --help was shown, or this host followed another one to its end."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; args: without the program's name, None for those of this process. Returns the exit status."""
    # XLA's and TensorFlow's C++ code reads this when jax is imported; at its default it chats on stderr.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        status = _dispatch(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()  # a reader that is gone shows here and not at exit, where nobody could catch it
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except (NoriaError, OSError) as error:
        print(f"noria: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _dispatch(args: list[str]) -> int:
    command = args[0] if args else "--help"
    if command in ("-h", "--help", "help"):
        print(_help())
    elif command in ("-V", "--version"):
        print(f"noria {__version__}")
    elif command in COMMANDS:
        with contextlib.suppress(Done):
            return importlib.import_module(f"noria.cli.{command}").main(args[1:])
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {command}; {hint}")
    return 0


def _help() -> str:
    commands = "\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())
    return (
        f"usage: noria COMMAND ...\n\ncommands:\n{commands}\n\n"
        "noria COMMAND --help shows the options of a command; noria --version the version.\n\n"
        'example: noria run smollm2-135m-instruct -p "What is a water wheel?"'
    )


def _drop_stdout() -> None:
    """Points stdout at nothing, so that the interpreter does not fail again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
