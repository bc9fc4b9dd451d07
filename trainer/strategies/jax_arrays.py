"""Arrays on a mesh of JAX devices: put there, taken apart by device, and put together again."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.lib import xla_client
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

REPLICATED = PartitionSpec()


def shares_threads(mesh: jax.sharding.Mesh) -> bool:
    """Whether devices share threads, so that collectives of several programs in flight would deadlock."""
    return bool(mesh.size > 1 and mesh.devices.flat[0].platform == "cpu")


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays, the same on all processes, as the sharding says.

    Not by jax.device_put alone: from one process's device onto those of several, JAX 0.10 makes an array
    that can't be taken apart again.
    """

    def place(array: Any) -> Any:
        # Equal, not equivalent: on one device many are, and JAX compiles for each of them.
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


def per_device(tree: Any) -> list[Any]:
    """Each device's own part of global arrays, as arrays of that device."""
    leaves, structure = jax.tree.flatten(tree)
    if len(places := leaves[0].sharding.device_set) == 1:
        # Not the shards, for those of a single device are the global arrays themselves, whose types name the mesh:
        # JAX would trace and compile for them what it has for a device's.
        place = SingleDeviceSharding(*places)
        parts: list[Any] = [[assembled(_type(leaf.shape, leaf.dtype), place, leaf) for leaf in leaves]]
    else:
        parts = list(zip(*(leaf._arrays for leaf in leaves), strict=True))  # the shards' data, in a third of the time
    return [jax.tree.unflatten(structure, part) for part in parts]


def copied(trees: Sequence[Any], devices: Sequence[jax.Device]) -> list[Any]:
    """Copies of trees of one device each, on a device each."""
    leaves, structure = jax.tree.flatten(list(trees))
    places = [device for tree, device in zip(trees, devices, strict=True) for _ in jax.tree.leaves(tree)]
    copies = xla_client.batched_copy_array_to_devices_with_sharding(  # jax.device_put takes 20 µs for each array
        leaves,
        [xla_client.DeviceList((place,)) for place in places],
        [SingleDeviceSharding(place) for place in places],
        [xla_client.ArrayCopySemantics.ALWAYS_COPY] * len(leaves),
    )
    return list(jax.tree.unflatten(structure, copies))


def assembled(type_: ShapedArray, sharding: Sharding, *parts: Any) -> jax.Array:
    """An array of such a type of its parts; make_array_from_single_device_arrays takes three times as long."""
    return ArrayImpl(type_, sharding, [*parts], committed=True, _skip_checks=True)


_type = functools.lru_cache(ShapedArray)  # of an array that is on no mesh


def joined(sharding: NamedSharding, trees: Any) -> Any:
    """Global arrays of each device's part: laid end to end, or one value that all have."""
    sharded = sharding.spec != REPLICATED
    factor = len(sharding.mesh.devices.flat) if sharded else 1

    def join(*parts: Any) -> Any:
        shape = (parts[0].shape[0] * factor, *parts[0].shape[1:]) if sharded else parts[0].shape
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(join, *trees)
