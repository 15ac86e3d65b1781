"""`noria compile`: the compile cache is filled before the first start, without reading the weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from noria.cli import options
from noria.cli.display import fetch, note, progress_bar
from noria.cli.hosts import follow_if_told
from noria.config import EngineConfig

_TEXT = """Compiles what a model needs, so that a later start with the same options finds every program in the cache.

The defaults are those of noria run and noria chat; an LLM in Python has another max_num_seqs unless it is told."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "compile",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.option("json", bool, False, "print one JSON object instead of the text"),
        ],
        engine=options.engine_options(max_num_seqs=8),
    )
    config = EngineConfig(model=chosen.model, **options.values_of(chosen.engine))
    path = fetch(config.model, config.revision)
    follow_if_told(config, path)
    from noria.engine.startup import compile_programs  # jax comes with it; errors of the options come first

    report = compile_programs(dataclasses.replace(config, model=str(path), revision=None), progress_bar)
    if chosen.json:
        figures = {"programs": report.programs, "compiled": report.compiled, "seconds": round(report.warmup_s, 3)}
        print(json.dumps({"model": chosen.model, **figures}))
    else:
        print(f"{report.programs} programs in {report.warmup_s:.1f} s, {report.compiled} compiled")
        note(str(report.memory))
    return 0
