"""What a plan is made of, with eight CPU devices in the place of the chips: memory, speeds and the exchanges of the
smallest forward pass, printed as JSON; and a search.

Its argument is JSON: a model as for noria plan, a topology, options that all have, those of each engine by name, and
whether to search.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any
from unittest import mock

import jax

from noria.aot import setup
from noria.aot.models import load_config
from noria.aot.programs import compile_all
from noria.aot.search import expected_bytes, expected_programs, search
from noria.aot.setup import Setup
from noria.aot.topologies import parse_topology
from noria.cli.plan import search_as_json, speed_as_json
from noria.config import EngineConfig
from noria.errors import ConfigError


def figures(made: Setup) -> dict[str, Any]:
    jobs, ranks = made.runner.jobs(), made.config.num_ranks
    key = next(key for key in jobs if isinstance(key, tuple) and key[0] == "forward")
    mesh, layers = made.runner.placement.mesh, made.layers_in_loop
    (forward,) = compile_all({key: jobs[key]}, num_layers=layers, mesh=mesh, threads=1)
    estimate = made.estimator(expected_programs(made))
    return {
        "memory": dataclasses.asdict(made.memory) | {"cache": made.memory.cache},
        "rows": made.rows,
        "forward": dataclasses.asdict(forward),
        "expected_sent": expected_bytes(made, forward.bucket // ranks),
        "decode": speed_as_json(estimate.decode(made.rows)),
        "prefill": speed_as_json(estimate.prefill(made.config.max_num_batched_tokens)),
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    model, topology = load_config(job["model"]), parse_topology(job["topology"])
    config = EngineConfig(model="m", **job["options"])
    found: dict[str, Any] = {}
    with mock.patch.object(setup, "compile_only_devices", lambda asked: jax.devices()[: asked.num_devices]):
        for name, options in job["engines"].items():
            try:
                found[name] = figures(setup.prepare(dataclasses.replace(config, **options), model, topology))
            except ConfigError as error:
                found[name] = {"refused": str(error)}
        if job["search"]:
            searched = search(config, model, topology)
            found["search"] = search_as_json(searched)
            best = searched.config
            found["best"] = [best.tensor_parallel_size, best.attention_data_parallel_size]
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
