"""What goes on around the compiler for TPUs, with this machine's CPU in the place of the chips."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from noria.aot import compile as aot_compile
from noria.aot import setup
from noria.aot.compile import compile_into
from noria.aot.models import load_config
from noria.aot.programs import compile_all
from noria.aot.search import layouts, search
from noria.aot.setup import compile_threads, copies_in_slice, prepare, sizes_for
from noria.aot.topologies import Topology, parse_topology
from noria.config import EngineConfig
from noria.errors import CompileError, ConfigError
from noria.parallel.mesh import MeshShape, make_mesh
from noria.runner.stored import StoredPrograms

TINY = load_config(str(Path(__file__).parents[1] / "golden" / "models" / "llama"))
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
SMALL: dict[str, Any] = {**SIZES, "dtype": "float32", "num_blocks_override": 9}
ONE = parse_topology("v6e:1x1")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Topology]:
    """The topologies that devices were asked for; of whatever size, there is this one."""
    topologies: list[Topology] = []

    def devices(topology: Topology) -> list[Any]:
        topologies.append(topology)
        return jax.devices()[:1]

    monkeypatch.setattr(setup, "compile_only_devices", devices)
    return topologies


def one_device() -> Mesh:
    return make_mesh(MeshShape(), jax.devices()[:1])


def test_search_names_why_a_mesh_cannot_be_had() -> None:
    options = SIZES | {"max_num_batched_tokens": 300, "max_model_len": 256}
    found = search(EngineConfig(model="m", **options), TINY, parse_topology("v6e:2x2"))
    alone, *others = found.meshes
    assert (alone.tensor_parallel_size, alone.copies, alone.reason) == (1, 4, None)
    assert alone.decode is not None
    assert alone.tokens_per_s == pytest.approx(4 * alone.decode.rows / alone.decode.seconds)
    assert others
    for each in others:
        ranks = each.attention_data_parallel_size
        reason = "a mesh of data 1 x" if ranks <= 2 else r"max_num_seqs \(2\) must be a multiple"
        assert each.decode is None
        assert re.search(reason, each.reason or "")
    assert [each.token_bucket_gap for each in found.buckets] == [0, 128, 256]
    assert min(each.waste for each in found.buckets) >= 0
    assert found.config.tensor_parallel_size == 1
    assert found.config.token_bucket_gap in (0, 128, 256)


def sizes(layouts: list[EngineConfig]) -> list[tuple[int, int]]:
    return [(each.attention_data_parallel_size, each.tensor_parallel_size) for each in layouts]


def test_attention_is_divided_by_request_where_heads_would_be_copied() -> None:
    llama, deepseek, config = load_config("llama-3.1-70b"), load_config("deepseek-v3"), EngineConfig(model="m")
    tried = lambda model, text, **options: sizes(
        layouts(dataclasses.replace(config, **options), model, parse_topology(text))
    )
    alone = [(1, 1), (1, 2), (1, 4), (1, 8)]
    assert tried(llama, "v6e:2x4") == alone  # each of the eight KV heads is on one device
    assert tried(llama, "v6e:4x4") == [*alone, (1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert tried(llama, "v6e:2x4", attention_data_parallel_size=2) == [(2, 1), (2, 2), (2, 4)]
    # There is one latent vector, and experts are for devices along both axes.
    some = tried(deepseek, "v6e:8x8", expert_parallel_size=8)
    assert some == [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
    assert (64, 1) not in tried(deepseek, "v6e:8x8", expert_parallel_size=8)
    assert (64, 1) in tried(deepseek, "v6e:8x8")
    assert tried(llama, "v6e:4x4", attention_data_parallel_size=14) == [(14, 1)]
    assert tried(llama, "v6e:4x4", attention_data_parallel_size=5) == [(5, 1)]  # which is refused, with the reason


def test_search_without_a_mesh() -> None:
    with pytest.raises(ConfigError, match=r"no mesh of v6e:1x1 can be had; .* it does not fit v6e:1x1"):
        search(EngineConfig(model="m", max_model_len=4096), load_config("llama-3.1-70b"), ONE)


@pytest.mark.parametrize(
    ("model", "topology", "share", "remedy"),
    [
        ("llama-3.1-70b", "v5p:1x1x1", 0.9, "quantization int8"),
        ("qwen3-32b", "v6e:1x1", 0.9, "tensor_parallel_size 4"),
        ("llama-3.1-70b", "v6e:1x1", 0.01, "chips with more memory"),
    ],
)
def test_what_would_make_it_fit(model: str, topology: str, share: float, remedy: str) -> None:
    config = EngineConfig(model="m", max_model_len=4096, memory_utilization=share)
    with pytest.raises(ConfigError, match=rf"weights take [\d.]+ of [\d.]+ GiB a device; use {remedy}$"):
        prepare(config, load_config(model), parse_topology(topology))


def test_the_smaller_grid_is_asked_for(asked: list[Topology]) -> None:
    """Of the first four devices of a larger one libtpu would make nothing."""
    for topology, size, part in (
        ("v6e:8x8", 4, "v6e:2x2"),
        ("tpu7x:2x2x2", 8, "tpu7x:2x2x1"),
        ("v6e:2x4", 8, "v6e:2x4"),
    ):
        config = EngineConfig(model="m", tensor_parallel_size=size, **SIZES)
        with pytest.raises(ConfigError, match="but there are 1"):
            prepare(config, load_config("llama-3.1-8b"), parse_topology(topology))
        assert asked[-1].name == part


@pytest.mark.parametrize(("slices", "told", "threads"), [(2, None, 1), (2, 3, 3), (1, 3, 3), (1, None, None)])
def test_programs_for_several_slices_are_compiled_one_by_one(slices: int, told: int | None, threads: int) -> None:
    """Unless it is told otherwise."""
    config = EngineConfig(model="m", compile_threads=told, **SMALL)
    assert compile_threads(config, parse_topology("v6e:1x1", slices)) == threads


def test_an_order_of_devices_is_of_one_slice() -> None:
    config = EngineConfig(model="m", device_order=(0,), **SIZES)
    with pytest.raises(ConfigError, match="device_order names the devices of one slice"):
        prepare(config, TINY, parse_topology("v6e:1x1", num_slices=2))


def test_compiling_into_a_folder(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    config = EngineConfig(model="m", **SMALL)
    made, count = compile_into(tmp_path, config, TINY, ONE, progress=lambda *done: shown.append(done))
    stored = StoredPrograms.open(tmp_path)
    stored.check(made.runner.origin)
    assert (stored.num_blocks, len(stored.digests)) == (9, count)
    assert shown == [(done, count) for done in range(1, count + 1)]
    assert sorted(path.stem for path in tmp_path.glob("*.bin")) == sorted(stored.digests)


def test_a_program_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is written."""

    def lower(*_: Any) -> Any:
        raise RuntimeError("\nno room\nin detail")

    monkeypatch.setattr(aot_compile, "lower", lower)
    with pytest.raises(CompileError, match=r"does not compile for v6e:1x1: no room$"):
        compile_into(tmp_path, EngineConfig(model="m", **SMALL), TINY, ONE)
    assert not list(tmp_path.iterdir())


def test_copies_are_divided_among_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    two = parse_topology("v6e:2x2", num_slices=2)
    config = EngineConfig(model="m", **SMALL)
    copies = lambda size: copies_in_slice(dataclasses.replace(config, data_parallel_size=size), two)
    assert [copies(size) for size in (1, 2, 4)] == [1, 1, 2]
    with pytest.raises(ConfigError, match=r"data_parallel_size \(3\) must be a multiple of the 2 slices"):
        copies(3)
    assert sizes_for(TINY, two, dataclasses.replace(config, data_parallel_size=4)) == (1, 2)


@pytest.mark.parametrize(
    ("options", "slices", "message"),
    [
        ({}, 2, "compiled for one slice"),
        ({"nnodes": 2}, 1, "nnodes: programs are compiled into a folder for one host"),
        ({"compile_cache_dir": "c"}, 1, "compile_cache_dir: the programs go to the folder"),
        ({"programs_dir": "d"}, 1, "programs_dir: here programs are compiled, not fetched"),
    ],
)
def test_folders_are_not_made_for(tmp_path: Path, options: dict[str, Any], slices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compile_into(tmp_path, EngineConfig(model="m", **options), TINY, parse_topology("v6e:1x1", slices))


def jobs() -> dict[Any, Any]:
    def broken() -> Any:
        raise ValueError("cannot be lowered\nin detail")

    product = jax.jit(lambda x: x @ x)
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return {
        ("forward", 8): lambda: product.lower(shape),
        ("decode", 2): lambda: product.lower(shape),
        ("sample", 4): broken,
        "tables": lambda: product.lower(shape),
    }


def test_figures_of_programs(tmp_path: Path) -> None:
    found = compile_all(jobs(), num_layers=3, mesh=one_device(), threads=2, dump=tmp_path / "texts")
    forward, decode, sample, tables = found
    assert [(each.name, each.bucket) for each in found] == [
        ("forward", 8),
        ("decode", 2),
        ("sample", 4),
        ("tables", None),
    ]
    assert sample.error == "cannot be lowered"
    assert tables.flops is not None
    assert (forward.flops, decode.flops) == (3 * tables.flops, None)
    assert tables.flops == pytest.approx(2 * 64**3, rel=0.05)
    assert tables.arguments == 64 * 64 * 4
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == [
        "decode-2.txt",
        "forward-8.txt",
        "tables.txt",
    ]
    assert "HloModule" in (tmp_path / "texts" / "tables.txt").read_text()


def test_a_folder_for_texts_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"dump_hlo .*; choose another folder"):
        compile_all(jobs(), num_layers=1, mesh=one_device(), threads=1, dump=tmp_path / "file")
