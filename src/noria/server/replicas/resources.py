"""What a replica needs of a Ray cluster, and whether the cluster has it. Knows Ray's words and not Ray."""

from __future__ import annotations

from collections.abc import Mapping

from noria.config import EngineConfig
from noria.errors import ConfigError


def resources_of(engine: EngineConfig, cluster: Mapping[str, float]) -> dict[str, float]:
    """What a replica takes, by Ray's names: a TPU or GPU for each device of its mesh, or a CPU.

    device auto: the best kind that the cluster has.
    """
    kinds = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}
    best = next((kind for kind in ("tpu", "gpu") if cluster.get(kinds[kind])), "cpu")
    kind = best if engine.device == "auto" else engine.device
    return {"CPU": 1.0} if kind == "cpu" else {kinds[kind]: float(engine.num_devices)}


def check_room(needs: Mapping[str, float], replicas: int, cluster: Mapping[str, float]) -> None:
    """Raises ConfigError when the cluster is too small: Ray would wait for it to grow."""
    for name, count in needs.items():
        if (there := cluster.get(name, 0)) < replicas * count:
            raise ConfigError(
                f"replicas ({replicas}) need {replicas * count:g} {name}, but the Ray cluster has {there:g}; start "
                "fewer, or join more machines with ray start"
            )


def say(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in needs.items())
