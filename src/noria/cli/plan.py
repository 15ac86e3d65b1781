"""`noria plan`: will a model run on some TPUs, with how much cache, and how fast at best; without TPU or weights."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.cli import options
from noria.cli.display import counting_bar
from noria.cli.main import UsageError
from noria.config import EngineConfig
from noria.errors import ConfigError

if TYPE_CHECKING:
    from noria.aot.estimate import Speed
    from noria.aot.plan import Plan
    from noria.aot.search import Search

_TEXT = """Compiles every program that serving a model on some TPUs needs, on this machine, which has none.

Says which of them compile, how a chip's memory is divided, how many tokens of KV cache fit, and what speed the chips'
peak figures allow. MODEL is a folder with a config.json, such a file, a .gguf file, or the name of a bundled config;
weights are not needed. With --tensor-parallel-size 0, the default, as many devices as can share the model; with
--search as many as is best. Needs the compiler for TPUs: pip install noria[aot]."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "plan",
        _TEXT,
        args,
        [
            options.argument(
                "model", "MODEL", "a folder with config.json, such a file, a .gguf file, or a bundled config"
            ),
            options.option("topology", str, options.MISSING, "chips and their grid, as in v6e:2x4"),
            options.option(
                "num_slices", int, 1, "of them, which a slower network joins; each has a copy of the model, or several"
            ),
            options.option(
                "context",
                int | None,
                None,
                "tokens that a decoding request has; half of most_model_len, or of the longest",
            ),
            options.option("search", bool, False, "try meshes and token buckets, and plan for the best"),
            options.option("dump_hlo", str | None, None, "folder for the text of every compiled program"),
            options.option("json", bool, False, "print one JSON object instead of the table"),
        ],
        engine=options.engine_options(tensor_parallel_size=0),
    )
    values = options.values_of(chosen.engine)
    size = values.pop("tensor_parallel_size")
    config = EngineConfig(model=chosen.model, **values, tensor_parallel_size=size or 1)
    if config.nnodes > 1:
        raise UsageError("the topology says how many hosts there are; leave --nnodes out")
    refuse_device(config)
    if chosen.search and size:
        raise ConfigError("--search chooses the tensor_parallel_size; leave one of them out")
    use_libtpu()
    # jax comes with the rest; errors of the options come first, and libtpu reads the environment when it is loaded.
    from noria.aot.models import load_config
    from noria.aot.plan import make_plan
    from noria.aot.search import search
    from noria.aot.setup import sizes_for
    from noria.aot.topologies import parse_topology

    topology = parse_topology(chosen.topology, chosen.num_slices)
    model = load_config(chosen.model)
    found = None
    if chosen.search:
        found = search(config, model, topology, context=chosen.context)
        config = found.config
    elif not size:
        sizes = sizes_for(model, topology, config)
        config = dataclasses.replace(config, tensor_parallel_size=max(sizes, default=1))
    dump = None if chosen.dump_hlo is None else Path(chosen.dump_hlo)
    with counting_bar("compiling") as progress:
        plan = make_plan(config, model, topology, context=chosen.context, dump=dump, progress=progress)
    if chosen.json:
        told = {"model": chosen.model} | as_json(plan)
        print(json.dumps(told if found is None else told | {"search": search_as_json(found)}))
    else:
        from noria.cli.plan_table import show, show_search

        if found is not None:
            show_search(found)
        show(chosen.model, plan)
    return 0 if plan.compiles else 1


def refuse_device(config: EngineConfig) -> None:
    """Raises ConfigError when the options name another kind of device than the topology."""
    if config.device not in ("auto", "tpu"):
        raise ConfigError(f"device {config.device}: --topology names TPUs to compile for; leave one of them out")


def use_libtpu() -> None:
    """What libtpu wants to know on a machine without a TPU; before jax is imported."""
    from noria.aot.environment import ENVIRONMENT

    for name, value in ENVIRONMENT:
        os.environ.setdefault(name, value)


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds and operations, all of one device."""
    memory = dataclasses.asdict(plan.memory) | {"cache": plan.memory.cache}
    return {
        "topology": plan.topology.name,
        "slices": plan.topology.num_slices,
        "devices": plan.topology.num_devices,
        "data_parallel_size": plan.config.data_parallel_size,
        "attention_data_parallel_size": plan.config.attention_data_parallel_size,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "token_bucket_gap": plan.config.token_bucket_gap,
        "expert_parallel_size": plan.config.expert_parallel_size,
        "dtype": plan.dtype,
        "parameters": plan.parameters,
        "memory": memory,
        "cache_tokens": plan.cache_tokens,
        "programs": [
            dataclasses.asdict(figures)
            | {"roofline": None if roofline is None else dataclasses.asdict(roofline) | {"seconds": roofline.seconds}}
            for figures, roofline in plan.programs
        ],
        "decode": speed_as_json(plan.decode),
        "prefill": speed_as_json(plan.prefill),
        "draft": plan.draft and as_json(plan.draft),
    }


def search_as_json(found: Search) -> dict[str, Any]:
    return {
        "meshes": [
            dataclasses.asdict(each)
            | {"decode": speed_as_json(each.decode), "prefill": speed_as_json(each.prefill)}
            | {"tokens_per_s": each.tokens_per_s}
            for each in found.meshes
        ],
        "buckets": [dataclasses.asdict(each) for each in found.buckets],
    }


def speed_as_json(speed: Speed | None) -> dict[str, Any] | None:
    return None if speed is None else dataclasses.asdict(speed) | {"tokens_per_s": speed.tokens_per_s}
