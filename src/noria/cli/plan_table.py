"""What `noria plan` prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from noria.aot.plan import Plan
from noria.aot.search import MeshChoice, Search
from noria.config import EngineConfig

_GB = 1e9


def show(model: str, plan: Plan) -> None:
    console = _console()
    if plan.draft is not None:
        show(f"draft model {plan.draft.config.model}", plan.draft)
        console.print()
    used, there = plan.config.num_devices, plan.topology.num_slices * plan.topology.num_devices
    copies, parts = plan.config.data_parallel_size, plan.config.attention_data_parallel_size
    ranks = f", {copies} copies of the model" if copies > 1 else ""
    ranks += f", attention in {parts} parts by request" if parts > 1 else ""
    console.print(f"{model} on {plan.topology.title}: {used} of {there} devices{ranks}, {plan.dtype}")
    _show_programs(console, plan)
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
        drafts = " without drafts" if plan.config.speculation else ""
        console.print(
            f"decode at best{drafts}: {plan.decode.tokens_per_s:,.0f} tokens/s with {plan.decode.rows} requests of "
            f"{plan.decode.context:,} tokens, {plan.decode.seconds * 1e3:.2f} ms a step"
        )
    if plan.prefill is not None:
        console.print(f"prefill at best: {plan.prefill.tokens_per_s:,.0f} tokens/s, {plan.prefill.tokens:,} a step")


def _show_programs(console: Console, plan: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("program", "size", "compiled", "GFLOP", "MB", "at best", "bound", "sent MB", "args MB", "temp MB"):
        is_text = title in ("program", "bound")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
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
            f"{figures.arguments / 1e6:,.1f}",
            f"{figures.temporary / 1e6:,.1f}",
        )
    console.print(table)
    for figures, _ in plan.programs:
        if figures.error is not None:
            size = "" if figures.bucket is None else f" {figures.bucket}"
            console.print(f"does not compile: {figures.name}{size}: {figures.error}", markup=False)


def show_search(found: Search) -> None:
    """The meshes and the buckets that were tried; what is recommended has a star."""
    console = _console()
    best = found.config
    table = Table(box=None, pad_edge=False)
    sizes = ("tensor parallel", "attention data")
    for title in ("", *sizes, "copies", "cache tokens", "requests", "ms a step", "decode/s", "prefill/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in found.meshes:
        is_best = _sizes(each) == _sizes(best)
        if each.decode is None or each.prefill is None:
            continue
        table.add_row(
            "*" if is_best else "",
            *map(str, _sizes(each)),
            str(each.copies),
            f"{each.cache_tokens:,}",
            str(each.decode.rows),
            f"{each.decode.seconds * 1e3:.2f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.copies * each.prefill.tokens_per_s:,.0f}",
        )
    console.print(table)
    for each in found.meshes:
        if each.reason is not None:
            tensor, parts = _sizes(each)
            mesh = f"tensor parallel {tensor}" + f", attention data {parts}" * (parts > 1)
            console.print(f"{mesh}: {each.reason}", markup=False)
    for each in found.buckets:
        star = "*" if each.token_bucket_gap == best.token_bucket_gap else " "
        console.print(
            f"{star} token_bucket_gap {each.token_bucket_gap}: {each.programs} programs, padding takes "
            f"{100 * each.waste:.1f}% more time"
        )
    tensor, parts = _sizes(best)
    mesh = f"--tensor-parallel-size {tensor}" + f" --attention-data-parallel-size {parts}" * (parts > 1)
    console.print(f"recommended: {mesh} --token-bucket-gap {best.token_bucket_gap}")


def _sizes(layout: MeshChoice | EngineConfig) -> tuple[int, int]:
    return layout.tensor_parallel_size, layout.attention_data_parallel_size


def _console() -> Console:
    """Tables are whole where there is no terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=160)
