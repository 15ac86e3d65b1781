"""Prints as JSON what devices exchange in programs of an engine: (kind, bytes, times) of each collective.

Its argument is JSON: a model folder, and options of each engine by name, of which `head` is the config of a draft head.
Nothing but those programs is made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from noria.aot.hlo import exchanges
from noria.config import EngineConfig, ModelLimits
from noria.models.eagle3 import build_head
from noria.models.registry import build_model
from noria.parallel.mesh import MeshShape, make_mesh
from noria.runner.runner import ModelRunner


def runner_of(model_config: dict[str, Any], options: dict[str, Any]) -> ModelRunner:
    model = build_model(model_config)
    head = build_head(options["head"], model.config) if "head" in options else None
    options = {name: value for name, value in options.items() if name != "head"}
    config = EngineConfig(
        model="",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=8,
        attention_backend="xla",
        linear_backend="xla",
        compile_cache_dir="",
        **options,
    )
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    shape = MeshShape.of(config)
    mesh = make_mesh(shape, jax.devices()[: shape.size])
    runner = ModelRunner(config.resolve(limits, "cpu"), model, "float32", mesh, model.config.vocab_size, head)
    runner.describe_model(None)
    if runner.head is not None:
        runner.head.describe(None)
    runner.initialize_kv_cache(40, allocate=False)
    return runner


def main(job: dict[str, Any]) -> dict[str, Any]:
    model_config = json.loads((Path(job["model"]) / "config.json").read_text())
    found: dict[str, Any] = {}
    for name, options in job["engines"].items():
        jobs = runner_of(model_config, options).jobs()
        wanted = (("follow", 16), ("draft", 8)) if "head" in options else (("forward", 16), ("sample", 8))
        texts = {key[0]: jobs[key]().compile().as_text() for key in wanted}
        found[name] = {
            program: [(each.kind, each.bytes, each.times) for each in exchanges(text)]
            for program, text in texts.items()
        }
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
