"""The mesh: devices in an order, along axes with names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from noria.config import EngineConfig
from noria.errors import ConfigError

DATA, ATTENTION_DATA, EXPERT, MODEL = AXES = ("data", "attention_data", "expert", "model")
COPIES = "copies"  # an axis that nothing is split over, of what has fewer parts than there are devices


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis, of which `data` is the slowest and `model` the fastest.

    Replicas of everything lie along `data`, requests (for attention) along `attention_data`, experts along `expert`,
    and heads and the insides of matrices along `model`.
    """

    data: int = 1
    attention_data: int = 1
    expert: int = 1
    model: int = 1

    @staticmethod
    def of(config: EngineConfig) -> MeshShape:
        return MeshShape(
            data=config.data_parallel_size,
            attention_data=config.attention_data_parallel_size,
            expert=config.expert_parallel_size,
            model=config.tensor_parallel_size,
        )

    @property
    def axes(self) -> dict[str, int]:
        """Two of them unless the other two are used."""
        every: dict[str, int] = dict(zip(AXES, (self.data, self.attention_data, self.expert, self.model)))
        if self.attention_data == self.expert == 1:
            return {DATA: self.data, MODEL: self.model}
        return every

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        """By the options that say so, without those that are 1."""
        sizes = {
            "data_parallel_size": self.data,
            "attention_data_parallel_size": self.attention_data,
            "expert_parallel_size": self.expert,
            "tensor_parallel_size": self.model,
        }
        used = {name: size for name, size in sizes.items() if size > 1} or {"tensor_parallel_size": 1}
        return " x ".join(f"{name} ({size})" for name, size in used.items())


def make_mesh(shape: MeshShape, devices: Sequence[Any], order: Sequence[int] = ()) -> Mesh:
    """A mesh of exactly these devices (jax.Device).

    order: ids of the devices, as they are to lie in the mesh; without it devices of a TPU are laid out so that
    neighbours along an axis are neighbours in the machine, and others as they come. Devices of several slices, which a
    slower network joins, are split along `data`: nothing but it reaches across (a hybrid mesh).
    Raises ConfigError when an id is unknown, or the axes do not multiply to the number of devices.
    """
    if order:
        devices = pick_devices(devices, order)
    if any(size < 1 for size in shape.axes.values()) or shape.size != len(devices):
        axes = " x ".join(f"{name} {size}" for name, size in shape.axes.items())
        raise ConfigError(
            f"a mesh of {axes} has {shape.size} devices, but there are {len(devices)}; their product must be that"
        )
    sizes = tuple(shape.axes.values())
    if order:
        grid = _as_array(devices).reshape(sizes)
    else:
        slices = _by_slice(devices)
        if shape.data % len(slices):
            raise ConfigError(
                f"the {len(slices)} slices must divide the data axis of the mesh, which is {shape.data}: "
                "only it may reach across slices"
            )
        inner = (shape.data // len(slices), *sizes[1:])
        grid = np.concatenate([_arrange(each, inner) for each in slices])
    return Mesh(grid, tuple(shape.axes))


def regroup(mesh: Mesh, shape: MeshShape) -> Mesh:
    """The devices of a mesh, in the same order, along the axes of another shape. Where it has fewer devices, those that
    are neighbours in the mesh have copies of each other."""
    axes, copies = shape.axes, mesh.size // shape.size
    if copies > 1:
        axes |= {COPIES: copies}
    if axes == dict(mesh.shape):
        return mesh
    return Mesh(mesh.devices.reshape(tuple(axes.values())), tuple(axes))


def pick_devices(devices: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Those with the ids, in that order. Raises ConfigError for an id that is twice there or nobody's."""
    by_id = {device.id: device for device in devices}
    for index, device_id in enumerate(order):
        if device_id not in by_id:
            raise ConfigError(f"device_order: there is no device {device_id}; ids are {_list(sorted(by_id))}")
        if device_id in order[:index]:
            raise ConfigError(f"device_order names device {device_id} twice; name each once")
    return [by_id[device_id] for device_id in order]


def devices_of_hosts(devices: Sequence[Any], shape: MeshShape, hosts: int) -> list[Any]:
    """The first of each host's devices, as many of each, host by host. Raises ConfigError when a host has too few."""
    by_host: dict[int, list[Any]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    share = shape.size // hosts
    for host in range(hosts):
        if len(found := by_host.get(host, [])) < share:
            raise ConfigError(
                f"{shape} needs {share} devices of each of the {hosts} hosts (nnodes), but host {host} has "
                f"{len(found)}; lower it"
            )
    return [device for host in range(hosts) for device in by_host[host][:share]]


def _by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len({len(members) for members in slices.values()}) > 1:
        raise ConfigError(f"the {len(slices)} slices have different numbers of devices; use equal ones")
    return [slices[index] for index in sorted(slices)]


def _arrange(devices: list[Any], sizes: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        # Of devices that do not fill a grid, as three chips of four, JAX knows no layout, and asserts that they do.
        with contextlib.suppress(AssertionError, ValueError, NotImplementedError):
            return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return _as_array(devices).reshape(sizes)


def _as_array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array


def _list(ids: list[int]) -> str:
    return ", ".join(map(str, ids)) if len(ids) <= 8 else f"{ids[0]} to {ids[-1]}"
