"""`noria compile`: fills the compile cache before the first start, without reading the weights; or a folder with
programs for TPUs that are elsewhere."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noria.cli import options
from noria.cli.display import counting_bar, fetch, note, progress_bar
from noria.cli.hosts import follow_if_told
from noria.cli.plan import refuse_device, use_libtpu
from noria.config import EngineConfig
from noria.errors import ConfigError

_TEXT = """Compiles what a model needs, so that a later start with the same options finds every program in the cache.

The defaults are those of noria run and noria chat; an LLM in Python has another max_num_seqs unless it is told.

With --topology and --out it compiles for TPUs that are elsewhere (pip install noria[aot]): copy the folder there and
start with --programs-dir and the same options. MODEL may then be a config as for noria plan, but its folder or .gguf
file is better: the programs know how many tokens the tokenizer has."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "compile",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.option("topology", str | None, None, "TPUs to compile for, chips and their grid, as in v6e:2x4"),
            options.option("out", str | None, None, "folder for the programs, with --topology"),
            options.option("json", bool, False, "print one JSON object instead of the text"),
        ],
        engine=options.engine_options(max_num_seqs=8),
    )
    config = EngineConfig(model=chosen.model, **options.values_of(chosen.engine))
    if (chosen.topology is None) != (chosen.out is None):
        raise ConfigError("--topology and --out belong together; give both, or none to fill the compile cache")
    if chosen.topology is not None:
        return _compile_elsewhere(config, chosen.topology, Path(chosen.out), as_json=chosen.json)
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


def _compile_elsewhere(config: EngineConfig, topology: str, out: Path, *, as_json: bool) -> int:
    refuse_device(config)
    use_libtpu()  # before jax, which comes with the rest
    from noria.aot.compile import compile_into
    from noria.aot.models import load_config
    from noria.aot.topologies import parse_topology

    chips, model = parse_topology(topology), load_config(config.model)
    begin = time.perf_counter()
    with counting_bar("compiling") as progress:
        setup, count = compile_into(out, config, model, chips, _num_valid_tokens(config), progress)
    seconds = time.perf_counter() - begin
    if as_json:
        figures: Mapping[str, Any] = {"programs": count, "compiled": count, "seconds": round(seconds, 3)}
        print(json.dumps({"model": config.model, **figures, "topology": chips.name, "out": str(out)}))
    else:
        print(f"{count} programs for {chips.name} in {seconds:.1f} s, in {out}")
        note(str(setup.memory))
    return 0


def _num_valid_tokens(config: EngineConfig) -> int | None:
    """As a start with the model's folder will find it; None where there is no tokenizer."""
    if config.skip_tokenizer_init:
        return None
    from noria.text.tokenizer import load_tokenizer

    if config.tokenizer:
        return load_tokenizer(Path(config.tokenizer)).vocab_size
    path = Path(config.model)
    inside = path.suffix == ".gguf" and path.is_file()
    has_one = inside or any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return load_tokenizer(path).vocab_size if has_one else None
