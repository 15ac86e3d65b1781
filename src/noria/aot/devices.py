"""Devices that can be compiled for and not run on."""

from __future__ import annotations

import importlib.util
from typing import Any

from jax.experimental import topologies

from noria.aot.topologies import Topology
from noria.errors import ConfigError


def is_available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def compile_only_devices(topology: Topology) -> list[Any]:
    """jax.Devices of the topology. Raises ConfigError without libtpu, or when it knows no such topology."""
    if not is_available():
        raise ConfigError(
            "the compiler for TPUs is not installed; install noria with its extra: pip install noria[aot]"
        )
    options: dict[str, Any] = {}
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if topology.num_chips == 1:  # else libtpu expects whole machines
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except Exception as error:  # whatever libtpu complains about, it is the topology that it cannot make
        reason = " ".join(str(error).split())
        raise ConfigError(f"topology {topology.title}: libtpu does not know it ({reason}); name another grid") from None
    return list(found.devices)
