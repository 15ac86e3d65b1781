"""`noria plan`: will a model run on some TPUs, with how much cache, and how fast at best; without TPU or weights."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from noria.cli import options
from noria.cli.display import counting_bar
from noria.cli.main import UsageError
from noria.config import EngineConfig

if TYPE_CHECKING:
    from noria.aot.estimate import Speed
    from noria.aot.plan import Plan

_TEXT = """Compiles every program that serving a model on some TPUs needs, on this machine, which has none.

Says which of them compile, how a chip's memory is divided, how many tokens of KV cache fit, and what speed the chips'
peak figures allow. MODEL is a folder with a config.json, such a file, or the name of a bundled config; weights are not
needed. With --tensor-parallel-size 0, the default, as many devices as can share the model. Needs the compiler for TPUs:
pip install noria[aot]."""
_GB = 1e9


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "plan",
        _TEXT,
        args,
        [
            options.argument("model", "MODEL", "a folder with config.json, such a file, or a bundled config"),
            options.option("topology", str, options.MISSING, "chips and their grid, as in v6e:2x4"),
            options.option("context", int | None, None, "tokens that a decoding request has; half of most_model_len, or of the longest"),
            options.option("json", bool, False, "print one JSON object instead of the table"),
        ],
        engine=options.engine_options(tensor_parallel_size=0),
    )
    values = options.values_of(chosen.engine)
    size = values.pop("tensor_parallel_size")
    config = EngineConfig(model=chosen.model, **values, tensor_parallel_size=size or 1)
    if config.nnodes > 1:
        raise UsageError("the topology says how many hosts there are; leave --nnodes out")
    # jax comes with the rest; errors of the options come first, and libtpu reads the environment when it is loaded.
    from noria.aot.topologies import parse_topology

    topology = parse_topology(chosen.topology)
    from noria.aot.devices import ENVIRONMENT
    from noria.aot.models import load_config
    from noria.aot.plan import default_size, make_plan

    for name, value in ENVIRONMENT:
        os.environ.setdefault(name, value)
    model = load_config(chosen.model)
    if not size:
        largest = default_size(model, topology, config.expert_parallel_size)
        config = dataclasses.replace(config, tensor_parallel_size=largest)
    with counting_bar("compiling") as progress:
        plan = make_plan(config, model, topology, context=chosen.context, progress=progress)
    if chosen.json:
        print(json.dumps({"model": chosen.model} | as_json(plan)))
    else:
        _show(chosen.model, plan)
    return 0 if plan.compiles else 1


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds and operations, all of one device."""
    memory = dataclasses.asdict(plan.memory) | {"cache": plan.memory.cache}
    return {
        "topology": plan.topology.name,
        "devices": plan.topology.num_devices,
        "tensor_parallel_size": plan.tensor_parallel_size,
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
        "decode": _speed(plan.decode),
        "prefill": _speed(plan.prefill),
    }


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    return None if speed is None else dataclasses.asdict(speed) | {"tokens_per_s": speed.tokens_per_s}


def _show(model: str, plan: Plan) -> None:
    console = Console(highlight=False, soft_wrap=True)
    used, there = plan.config.num_devices, plan.topology.num_devices
    console.print(f"{model} on {plan.topology.name}: {used} of {there} devices, {plan.dtype}")
    table = Table(box=None, pad_edge=False)
    for title in ("program", "size", "compiled", "GFLOP", "MB", "at best", "bound", "sent MB", "temp MB"):
        table.add_column(title, justify="left" if title in ("program", "bound") else "right")
    for figures, roofline in plan.programs:
        if figures.error is not None:
            continue
        known = lambda value, unit: "" if value is None else f"{value / unit:,.2f}"
        table.add_row(
            figures.name,
            "" if figures.bucket is None else str(figures.bucket),
            f"{figures.seconds:.1f} s",
            known(figures.flops, 1e9),
            known(figures.bytes, 1e6),
            "" if roofline is None else f"{roofline.seconds * 1e3:,.3f} ms",
            "" if roofline is None else roofline.bound,
            f"{figures.sent / 1e6:,.2f}",
            f"{figures.temporary / 1e6:,.1f}",
        )
    console.print(table)
    for figures, _ in plan.programs:
        if figures.error is not None:
            size = "" if figures.bucket is None else f" {figures.bucket}"
            console.print(f"does not compile: {figures.name}{size}: {figures.error}", markup=False)
    memory = plan.memory
    console.print(
        f"memory of a device: weights {memory.weights / _GB:,.2f} GB, largest step {memory.activations / _GB:,.2f} GB, "
        f"KV cache {memory.cache / _GB:,.2f} GB of {memory.available / _GB:,.2f} GB"
    )
    console.print(
        f"KV cache: {plan.cache_tokens:,} tokens, {memory.max_concurrency:.1f} requests of max_model_len "
        f"({plan.config.max_model_len:,})"
    )
    if plan.decode is not None:
        console.print(
            f"decode at best: {plan.decode.tokens_per_s:,.0f} tokens/s with {plan.decode.rows} requests of "
            f"{plan.decode.context:,} tokens, {plan.decode.seconds * 1e3:.2f} ms a step"
        )
    if plan.prefill is not None:
        console.print(f"prefill at best: {plan.prefill.tokens_per_s:,.0f} tokens/s, {plan.prefill.tokens:,} a step")
