"""Compiles forward passes for a topology, in a process of its own, and prints their figures as JSON.

Its argument is JSON: config of the model, topology, options of the engine, token buckets, and a folder for the texts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from noria.aot.environment import ENVIRONMENT

for name, value in ENVIRONMENT:
    os.environ.setdefault(name, value)

from noria.aot.programs import compile_all  # noqa: E402
from noria.aot.search import expected_bytes  # noqa: E402
from noria.aot.setup import prepare  # noqa: E402
from noria.aot.topologies import parse_topology  # noqa: E402
from noria.config import EngineConfig  # noqa: E402


def main(job: dict[str, Any]) -> dict[str, Any]:
    config = EngineConfig(model="m", **job["options"])
    setup = prepare(config, job["model"], parse_topology(job["topology"], job.get("slices", 1)))
    jobs = {key: job_ for key, job_ in setup.runner.jobs().items() if key in [("forward", n) for n in job["buckets"]]}
    programs = compile_all(
        jobs,
        num_layers=setup.layers_in_loop,
        mesh=setup.runner.placement.mesh,
        threads=1,
        dump=Path(job["dump"]),
    )
    spec = setup.runner.get_kv_cache_spec(setup.memory.num_blocks)
    return {
        "cache": setup.memory.cache,
        "cache_shape": spec.data.sharding.shard_shape(spec.data.shape),
        "programs": {each.bucket: dataclasses.asdict(each) for each in programs},
        "expected_sent": {n: expected_bytes(setup, n // setup.config.num_ranks) for n in job["buckets"]},
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
