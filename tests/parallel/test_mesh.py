"""The mesh and the rules: which device is where, what is split over what, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from noria import LLM, EngineConfig, follow
from noria.engine.startup import start
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.models.registry import build_model
from noria.nn.param import is_param
from noria.parallel.mesh import MeshShape, devices_of_hosts, make_mesh, regroup
from noria.parallel.rules import (
    RULES,
    check_sizes,
    kv_copies,
    num_shards,
    on_one_device,
    partition,
    shape_for_drafts,
    with_kv_copies,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "models"


@dataclass(frozen=True)
class Device:
    """What `make_mesh` looks at."""

    id: int
    slice_index: int = 0
    platform: str = "cpu"
    process_index: int = 0


@dataclass(frozen=True)
class Chip(Device):
    """What JAX looks at, too, when it lays out a mesh."""

    platform: str = "tpu"
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    device_kind: str = "TPU v6 lite"


def devices(count: int, slices: int = 1) -> list[Any]:
    return [Device(index, index * slices // count) for index in range(count)]


def ids(mesh: jax.sharding.Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.id)(mesh.devices)


def config(**changes: Any) -> DecoderConfig:
    llama = json.loads((GOLDEN / "llama" / "config.json").read_text())  # 4 heads, 2 KV heads, MLP of 80
    return dataclasses.replace(build_model(llama).config, **changes)


def abstract(**axes: int) -> Any:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def test_two_axes_unless_the_others_are_used() -> None:
    mesh = make_mesh(MeshShape(data=2, model=4), devices(8))
    assert mesh.axis_names == ("data", "model")
    assert ids(mesh).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = make_mesh(MeshShape(attention_data=2, expert=2, model=2), devices(8))
    assert dict(mesh.shape) == {"data": 1, "attention_data": 2, "expert": 2, "model": 2}


def test_an_order_is_obeyed() -> None:
    mesh = make_mesh(MeshShape(data=2, model=2), devices(4), order=[3, 1, 0, 2])
    assert ids(mesh).tolist() == [[3, 1], [0, 2]]


def test_chips_that_fill_no_grid_lie_as_they_come() -> None:
    """So that what is wrong with three of four, if anything, is said by those who know the model."""
    chips = [Chip(index, coords=(index % 2, index // 2, 0)) for index in range(4)]
    assert sorted(ids(make_mesh(MeshShape(model=4), chips)).flat) == [0, 1, 2, 3]
    assert ids(make_mesh(MeshShape(model=3), chips[:3])).tolist() == [[0, 1, 2]]


def test_only_the_data_axis_reaches_across_slices() -> None:
    interleaved = [Device(index, index % 2) for index in range(8)]
    mesh = make_mesh(MeshShape(data=4, model=2), interleaved)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (slices == slices[:, :1]).all()  # of one row all in one slice
    assert slices[:, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="the 2 slices must divide the data axis of the mesh, which is 1"):
        make_mesh(MeshShape(model=8), interleaved)


def regrouped(drafting: DecoderConfig, **sizes: int) -> jax.sharding.Mesh:
    shape = MeshShape(**sizes)
    mesh = make_mesh(shape, devices(shape.size))
    return regroup(mesh, shape_for_drafts(drafting, mesh))


def test_a_model_that_drafts_is_split_as_far_as_it_goes() -> None:
    """Where heads and MLP divide like those of the model, and where they do not: then neighbours have copies."""
    assert dict(regrouped(config(), model=4).shape) == {"data": 1, "model": 4}
    assert dict(regrouped(config(num_heads=2), model=4).shape) == {"data": 1, "model": 2, "copies": 2}
    assert dict(regrouped(config(num_heads=3, num_kv_heads=3), model=4).shape) == {"data": 1, "model": 1, "copies": 4}
    assert dict(regrouped(config(), expert=2, model=2).shape) == {"data": 1, "model": 4}
    # Each rank has one of its own, whichever axis it lies along.
    assert dict(regrouped(config(), data=2, attention_data=2, model=2).shape) == {"data": 4, "model": 2}
    mesh = regrouped(config(num_heads=1, num_kv_heads=1), attention_data=2, expert=2, model=2)
    assert dict(mesh.shape) == {"data": 2, "model": 1, "copies": 4}
    assert ids(mesh).tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_nothing_is_split_over_copies() -> None:
    mesh = regrouped(config(num_heads=2), model=8)
    sizes = {axis: num_shards(axis, mesh) for axis in RULES}
    assert {axis for axis, size in sizes.items() if size > 1} == {"heads", "kv_heads", "mlp", "expert_mlp", "vocab"}
    assert set(sizes.values()) == {1, 2}
    one = make_mesh(MeshShape(data=2, model=4), devices(8))
    assert regroup(one, MeshShape(data=2, model=4)) is one


def test_every_host_gives_as_many_devices() -> None:
    eight = [Device(index, process_index=index // 4) for index in range(8)]
    assert [device.id for device in devices_of_hosts(eight, MeshShape(model=4), 2)] == [0, 1, 4, 5]
    assert devices_of_hosts(eight, MeshShape(expert=4, model=2), 2) == eight
    message = r"expert_parallel_size \(5\) x tensor_parallel_size \(2\) needs 5 devices of each of the 2 hosts"
    with pytest.raises(ConfigError, match=rf"{message} \(nnodes\), but host 0 has 4"):
        devices_of_hosts(eight, MeshShape(expert=5, model=2), 2)
    with pytest.raises(ConfigError, match="host 2 has 0"):
        devices_of_hosts(eight, MeshShape(model=3), 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_hosts_cannot_share_is_refused_before_they_wait(rank: int) -> None:
    sizes = {"tensor_parallel_size": 3, "nnodes": 2, "node_rank": rank}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(3\) cannot be shared by 2 hosts \(nnodes\)"):
        (follow if rank else start)(EngineConfig(model=str(GOLDEN / "llama"), **sizes))


@pytest.mark.parametrize(
    ("shape", "order", "message"),
    [
        (MeshShape(data=2, model=3), (), "a mesh of data 2 x model 3 has 6 devices, but there are 8"),
        (MeshShape(model=2), (0, 9), "there is no device 9; ids are 0, 1, 2, 3, 4, 5, 6, 7"),
        (MeshShape(model=2), (1, 1), "names device 1 twice"),
    ],
)
def test_bad_meshes(shape: MeshShape, order: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_mesh(shape, devices(8), order)


def test_every_axis_that_models_name_has_a_rule() -> None:
    for folder in GOLDEN.iterdir():
        model = build_model(json.loads((folder / "config.json").read_text()))
        params = jax.tree.leaves(model.declaration(), is_leaf=is_param)
        assert {axis for param in params for axis in param.axes} <= set(RULES)


def test_partition() -> None:
    two, four = abstract(data=2, model=4), abstract(data=1, attention_data=2, expert=2, model=2)
    assert partition(("layers", "heads", "embed"), (2, 32, 64), two) == PartitionSpec(None, "model", None)
    assert partition(("layers", "embed", "mlp"), (2, 64, 80), four) == PartitionSpec(
        None, None, ("attention_data", "expert", "model")
    )
    assert partition(("heads",), (32,), four) == PartitionSpec(("expert", "model"))
    experts = ("layers", "expert", "expert_mlp", "embed")
    assert partition(experts, (2, 8, 24, 64), four) == PartitionSpec(None, ("attention_data", "expert"), "model", None)
    assert partition(experts, (2, 8, 24, 64), two) == PartitionSpec(None, None, "model", None)
    assert partition(("vocab", "embed"), (192, 64), two) == PartitionSpec("model", None)
    assert partition(("vocab", "embed"), (197, 64), two) == PartitionSpec(None, None)  # does not divide


def test_kv_heads_are_copied_where_they_are_too_few() -> None:
    assert kv_copies(config(), abstract(data=1, model=2)) == 1
    four = abstract(data=1, model=4)
    assert kv_copies(config(), four) == 2
    assert with_kv_copies(config(), four).num_kv_heads == 4
    one = on_one_device(with_kv_copies(config(), four), four)
    assert (one.num_heads, one.num_kv_heads, one.intermediate_size, one.vocab_size) == (1, 1, 20, 48)


@pytest.mark.parametrize(("size", "changes"), [(3, {}), (8, {}), (4, {"intermediate_size": 82})])
def test_sizes_that_do_not_divide(size: int, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size \({size}\) must divide .* possible: 1, 2"):
        check_sizes(config(**changes), size)


def moe(name: str = "mixtral") -> DecoderConfig:
    return build_model(json.loads((GOLDEN / name / "config.json").read_text())).config


@pytest.mark.parametrize(
    ("tensor", "expert", "message"),
    [
        (1, 3, r"expert_parallel_size \(3\) must divide the model's 4 experts; possible: 1, 2, 4$"),
        (4, 2, r"tensor_parallel_size \(4\) times expert_parallel_size \(2\) must divide .* 4 .* possible: 1, 2$"),
    ],
)
def test_experts_that_do_not_divide(tensor: int, expert: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sizes(moe(), tensor, expert)


def test_attention_data_shares_experts_too() -> None:
    check_sizes(moe(), 1, 2, 2)
    message = r"\(4\) x expert_parallel_size \(2\) devices .* 8 must divide .* experts \(4\); .*_size: 1, 2$"
    with pytest.raises(ConfigError, match=message):
        check_sizes(moe(), 1, 2, 4)


def test_a_model_without_experts_has_none_to_share() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel_size \(2\) is for models with experts"):
        check_sizes(config(), 1, 2)


def test_what_one_device_has_of_experts() -> None:
    one = on_one_device(moe(), abstract(data=1, attention_data=1, expert=2, model=2))
    assert one.moe is not None
    assert (one.moe.experts, one.moe.size, one.moe.routing.experts) == (2, 20, 4)
    assert one.num_heads == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 64}, r"tensor_parallel_size \(64\) needs 64 devices, but there are \d+ here"),
        ({"device_order": [0, 1]}, r"device_order names 2 devices, but tensor_parallel_size \(1\) needs 1"),
        ({"device_order": [77]}, r"device_order: there is no device 77; ids are \d"),
    ],
)
def test_engines_that_do_not_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(GOLDEN / "llama"), skip_tokenizer_init=True, **options)
