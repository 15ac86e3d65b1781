"""Plans and searches with eight CPU devices in the place of the chips, and prints them as JSON.

Its argument is JSON: a model as for noria plan, a topology, options that all have, those of each plan by name, and
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
from noria.aot.plan import make_plan
from noria.aot.search import expected_bytes, search
from noria.aot.topologies import parse_topology
from noria.cli.plan import as_json, search_as_json
from noria.config import EngineConfig
from noria.errors import ConfigError


def main(job: dict[str, Any]) -> dict[str, Any]:
    model, topology = load_config(job["model"]), parse_topology(job["topology"])
    config = EngineConfig(model="m", **job["options"])
    found: dict[str, Any] = {}
    with mock.patch.object(setup, "compile_only_devices", lambda asked: jax.devices()[: asked.num_devices]):
        for name, options in job["plans"].items():
            each = dataclasses.replace(config, **options)
            try:
                made = setup.prepare(each, model, topology)
            except ConfigError as error:
                found[name] = {"refused": str(error)}
                continue
            sent = {n * made.config.num_ranks: expected_bytes(made, n) for n in made.runner.buckets.tokens}
            found[name] = as_json(make_plan(each, model, topology)) | {"expected_sent": sent}
        if job["search"]:
            found["search"] = search_as_json(searched := search(config, model, topology))
            best = searched.config
            found["best"] = [best.tensor_parallel_size, best.attention_data_parallel_size]
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
