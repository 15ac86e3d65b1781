"""Which devices an engine runs on, and in what order."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.parallel.mesh import MeshShape, devices_of_hosts, make_mesh, pick_devices


def make_engine_mesh(config: EngineConfig) -> Mesh:
    """Of the first devices there are, or of those that device_order names. Raises ConfigError."""
    try:
        devices = jax.devices(None if config.device == "auto" else config.device)
    except RuntimeError:
        raise ConfigError(
            f"device {config.device}: JAX finds no such device here; it has {jax.default_backend()}"
        ) from None
    shape, order = MeshShape.of(config), config.device_order
    size = shape.size
    if size > len(devices):
        raise ConfigError(
            f"{shape} needs {size} devices, but there are {len(devices)} here ({devices[0].platform}); lower it"
        )
    if config.nnodes > 1:
        devices = devices if order else devices_of_hosts(devices, shape, config.nnodes)
        if devices[0].platform != "tpu":  # whose hosts count as slices each; here they are what the option says
            order = order or tuple(device.id for device in devices)
    if not order:
        return make_mesh(shape, devices[:size])
    if len(order) != size:
        raise ConfigError(f"device_order names {len(order)} devices, but {shape} needs {size}; name one for each shard")
    mesh = make_mesh(shape, pick_devices(devices, order), order)
    if (here := len({device.process_index for device in mesh.devices.flat})) < config.nnodes:
        raise ConfigError(f"device_order names devices of {here} of the {config.nnodes} hosts; name some of each")
    return mesh
