"""Where the arrays of an engine lie on its mesh: weights, cache, tables and everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from noria.models.config import DecoderConfig
from noria.nn.param import Param, is_param
from noria.ops.linear.types import DenseWeight, PackedWeight
from noria.ops.ragged_paged_attention.api import KVCache
from noria.parallel.rules import kv_copies, num_shards, partition


class Placement:
    """Of one model on one mesh."""

    def __init__(self, mesh: Mesh, model: DecoderConfig) -> None:
        """model: as the checkpoint has it, without copies of KV heads."""
        self.mesh = mesh
        self.devices: tuple[Any, ...] = tuple(mesh.devices.flat)
        self.replicated = self.split()
        self._kv_heads = model.num_kv_heads
        self._kv_copies = kv_copies(model, mesh)

    @property
    def is_parallel(self) -> bool:
        return len(self.devices) > 1

    @property
    def has_ranks(self) -> bool:
        return num_shards("ranks", self.mesh) > 1

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """Those of this host."""
        return tuple(device for device in self.devices if device.process_index == jax.process_index())

    def split(self, *dimensions: tuple[str | None, int]) -> Sharding:
        """dimensions: logical axis (None: not split) and size of each; what is left out at the end is not split."""
        if not self.is_parallel:
            return SingleDeviceSharding(self.devices[0])
        axes, sizes = zip(*dimensions) if dimensions else ((), ())
        return NamedSharding(self.mesh, partition(axes, sizes, self.mesh))

    def put(self, param: Param, leaf: Any) -> Any:
        """What was read or made for a Param (a host or device array, or a Weight of some) on the devices.

        KV heads are copied here, so once: what this returned must not be put again.
        """

        def one(array: Any, sharding: Sharding) -> jax.Array:
            return self._on_devices(self._copy_kv_heads(param, array), sharding)

        return self._each(param, leaf, one)

    def put_by_copy(self, array: np.ndarray) -> jax.Array:
        """On the devices, as by_copy says."""
        return self._on_devices(array, self.by_copy(array).sharding)

    def _on_devices(self, array: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding, may_alias=True)
        host = np.asarray(array)  # of which each host takes the parts of its own devices
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def describe(self, param: Param, leaf: Any) -> Any:
        """The shapes, with their places, of what `put` would make of arrays of such shapes."""

        def one(shape: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
            sizes = list(shape.shape)
            if self._is_copied(param):
                sizes[1] *= self._kv_copies
            return jax.ShapeDtypeStruct(tuple(sizes), shape.dtype, sharding=sharding)

        return self._each(param, leaf, one)

    def map(self, function: Callable[[Param, Any], Any], declaration: Any, weights: Any) -> Any:
        """put or describe, of all leaves of the weights that the declaration declares."""
        params, treedef = jax.tree.flatten(declaration, is_leaf=is_param)
        return treedef.unflatten(map(function, params, treedef.flatten_up_to(weights)))

    def cache(self, spec: KVCache) -> KVCache:
        """spec: shapes of the cache arrays -> the same with their places."""
        rows, _, heads = spec.data.shape[:3]

        def one(shape: Any) -> jax.ShapeDtypeStruct:
            sharding = self.split(("ranks", rows), (None, 0), ("kv_heads", heads))
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return jax.tree.map(one, spec)

    def host(self, shapes: Any) -> Any:
        """Shapes of arrays that every device has whole, from arrays or shapes."""
        one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.replicated)
        return jax.tree.map(one, shapes)

    def by_rank(self, packed: Any) -> jax.ShapeDtypeStruct:
        """The shape of a host array, [ranks, ...] or what one rank has alone, of which each needs its part.

        Where devices of other processes take part, every device has all of it: JAX places host arrays like that only.
        """
        return self._host_part("ranks", packed)

    def by_copy(self, packed: Any) -> jax.ShapeDtypeStruct:
        """The same where all ranks of a copy of the model need the parts of all of them."""
        return self._host_part("tokens", packed)

    def _host_part(self, axis: str, packed: Any) -> jax.ShapeDtypeStruct:
        is_own = self.replicated.is_fully_addressable
        sharding = self.split((axis, packed.shape[0])) if self.has_ranks and is_own else self.replicated
        return jax.ShapeDtypeStruct(packed.shape, packed.dtype, sharding=sharding)

    def by_token(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Of activations, [tokens or rows, ...]."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.split(("tokens", shape[0])))

    def bytes_on_one(self, arrays: Any) -> int:
        """What one device holds of arrays, or of shapes with their places."""
        size = lambda leaf: int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        return sum(map(size, jax.tree.leaves(arrays)))

    def shapes_on_one(self, arrays: Any) -> Any:
        """Shapes of what one device holds."""
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        return jax.tree.map(shape, arrays)

    def _each(self, param: Param, leaf: Any, function: Callable[[Any, Sharding], Any]) -> Any:
        """function of every array of the leaf and its sharding."""
        if isinstance(leaf, PackedWeight):  # never on several devices
            return dataclasses.replace(leaf, data=function(leaf.data, self.replicated))
        if not isinstance(leaf, DenseWeight):
            return function(leaf, self.split(*zip(param.axes, leaf.shape)))
        axes = param.axes if param.stacked else ("layers", *param.axes)
        sharding = self.split(*zip(axes, leaf.data.shape))
        data, scale = function(leaf.data, sharding), None
        if leaf.scale is not None:
            scale = function(leaf.scale, self.split(*zip(axes[:-1], leaf.scale.shape)))
        return DenseWeight(data, scale)

    def _is_copied(self, param: Param) -> bool:
        return self._kv_copies > 1 and "kv_heads" in param.axes

    def _copy_kv_heads(self, param: Param, array: Any) -> Any:
        """array: [layers, kv_heads * head_dim, ...]. Each head is followed by its copies, so that the query heads of a
        shard find theirs in the same shard."""
        if not self._is_copied(param):
            return array
        host = np.asarray(array)
        heads = host.reshape(host.shape[0], self._kv_heads, -1, *host.shape[2:])
        return np.repeat(heads, self._kv_copies, axis=1).reshape(host.shape[0], -1, *host.shape[2:])
