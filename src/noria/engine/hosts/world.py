"""The devices of all hosts as those of one program: JAX's part of the meeting."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.parallel.mesh import MeshShape


def check_share(config: EngineConfig) -> None:
    """Before anybody waits for a host. Raises ConfigError when the devices cannot be shared evenly."""
    if config.num_devices % config.nnodes:
        raise ConfigError(
            f"{MeshShape.of(config)} cannot be shared by {config.nnodes} hosts (nnodes): make it a multiple of that, "
            "because every host gives as many devices"
        )


def become_one(config: EngineConfig) -> None:
    """JAX's devices are those of all hosts from here on. Raises ConfigError when this process cannot take part."""
    if jax.distributed.is_initialized():
        raise ConfigError("nnodes: a process can join other hosts only once; start a new process for a new engine")
    # A host that is lost is noted by noria, and in seconds; JAX would abort every process, after minutes.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    address = f"{host}:{config.master_port + 1}"
    try:
        jax.distributed.initialize(
            address,
            config.nnodes,
            config.node_rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=config.distributed_timeout_seconds,
        )
    except RuntimeError as error:  # XlaRuntimeError is one
        first = str(error).splitlines()[0]
        raise ConfigError(f"the hosts cannot become one at {address}, the port after master_port: {first}") from None


def greet(mesh: Mesh) -> None:
    """First sums over all devices of the mesh, and over those along each axis: what is in the way between hosts shows
    before anything is loaded."""
    axes = tuple(mesh.axis_names)
    split = lambda names: NamedSharding(mesh, PartitionSpec(*(name if name in names else None for name in axes)))
    ones = np.ones((1,) * len(axes), np.int32)
    everywhere = jax.make_array_from_callback(mesh.devices.shape, split(axes), lambda _: ones)
    with _stdout_to_stderr():  # the CPU's collectives say on stdout, which is the answer's, that they are connected
        for summed in (axes, *((name,) for name in axes)):
            places = tuple(map(axes.index, summed))
            add = partial(jnp.sum, axis=places, keepdims=True)
            rest = split(set(axes) - set(summed))
            total = jax.jit(add, out_shardings=rest)(everywhere).addressable_shards[0].data.item()
            if total != (size := math.prod(mesh.shape[name] for name in summed)):
                raise ConfigError(f"{size} devices of the hosts add up to {total}; is the network sound?")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
