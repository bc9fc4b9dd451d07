"""Compiled steps on JAX where every device has all of the model, and the arrays that they take.

Legend of shapes: K steps of a block, V logical replicas, R devices, n = V / R replicas of one device,
b examples of a replica.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.lib import xla_client
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from input_pipeline.pipeline import Batch
from trainer.strategies.base import Block, quickest
from trainer.strategies.jax_step import Leaf, Tally, Update
from trainer.sums import Sums, Totals, Values

REPLICATED = PartitionSpec()
_LARGE = 2**16  # elements; to copy fewer takes less time than a message's latency


class OneProgram:
    """A loop whose steps are calls of one program; `whole`: how lies what every device has the whole of."""

    program: Any
    whole: NamedSharding

    def lower(self, values: Values, block: Block, totals: Totals) -> list[list[jax.stages.Lowered]]:
        """What is called with such a block."""
        return [[self.program.lower(values, placed(totals, self.whole), block, np.zeros(3, np.int32))]]


class FastLoop(OneProgram):
    """All steps of a call in one program; devices add by the backend's collectives.

    Where a variable's slots are cut over the devices, so is the work on it: a device gets its share of the
    gradient's sum, makes that share of the update, and all gather the new variable (Xu et al. 2020, arXiv:2004.13336).

    Args:
      mesh: one axis, data, of R devices.
      replicas: V.
      leaf: what a logical replica computes.
      update: what follows from the sums; None: the values stay, and are returned as None.
      tally: adds a step to the totals.
      shardings: of the values.
      slots: of each trainable variable's slots.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        replicas: int,
        leaf: Leaf,
        update: Update | None,
        tally: Tally,
        shardings: Values,
        slots: Sequence[NamedSharding],
    ) -> None:
        self._mesh, self._leaf, self._update, self._tally = mesh, leaf, update, tally
        self.whole = NamedSharding(mesh, REPLICATED)
        self._totals: Totals | None = None  # of the last call
        self._shares_threads = shares_threads(mesh)
        cut = [slot.spec for slot in slots] if update else []
        self._dims = [spec.index("data") if "data" in spec else None for spec in cut]
        lie = jax.tree.map(lambda sharding: sharding.spec, shardings)
        # What runs on each device. Not by constraints on arrays: XLA would carry the variables cut from step to step.
        on_devices = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        whole: Any = REPLICATED
        sums = Sums(whole, whole, whole, whole, cut)
        self._sums = on_devices(self._sums_over_devices, in_specs=(lie, PartitionSpec("data")), out_specs=sums)
        self._shares = on_devices(self._take_shares, in_specs=(REPLICATED,), out_specs=cut)
        self._gathered = on_devices(self._gather, in_specs=(cut,), out_specs=REPLICATED)
        results = (shardings if update else None, self.whole)
        self.program = jax.jit(self._steps, out_shardings=results, donate_argnums=(0,) if update else ())

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        # Fresh totals and those of an earlier call must look alike, or JAX compiles twice.
        if totals is not self._totals:
            totals = placed(totals, self.whole)
        # One array of three numbers, for each array takes a call as long as a small step's arithmetic.
        new_values, totals = self.program(values, totals, block, np.array([first, count, step], np.int32))
        self._totals = jax.block_until_ready(totals) if self._shares_threads else totals
        return new_values, self._totals

    def exchange(self, floats: int) -> float:
        """See Strategy.exchange."""
        add = functools.partial(jax.lax.psum, axis_name="data")
        compiled = jax.jit(
            jax.shard_map(add, mesh=self._mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
        )
        vector = placed(np.zeros(floats, np.float32), self.whole)
        return quickest(lambda: jax.block_until_ready(compiled(vector)))

    def _steps(self, values: Values, totals: Totals, block: Block, numbers: Any) -> Any:
        first, count, step = (numbers[i] for i in range(3))

        def one(i: Any, carry: tuple[Values, Totals]) -> tuple[Values, Totals]:
            values, totals = carry
            sums = self._sums(values, at(block, first + i))
            totals = self._tally(totals, values, sums, step + i)
            if self._update:
                values = self._update(values._replace(trainable=self._shares(values.trainable)), sums)
                values = values._replace(trainable=self._gathered(values.trainable))
            return values, totals

        # The number of turns is not known to the compiler: one program for any.
        values, totals = jax.lax.fori_loop(0, count, one, (values, totals))
        return (values if self._update else None), totals

    # What follows runs on one device.

    def _sums_over_devices(self, values: Values, batches: Batch) -> Sums:
        sums = self._local_sums(values, batches)
        if self._mesh.size == 1:  # XLA's CPU compiler would keep a sum over one device, as a copy
            return sums
        by_dim = list(zip(sums.gradients, self._dims, strict=True))
        uncut = sums._replace(gradients=[g for g, dim in by_dim if dim is None])
        whole = unpacked(jax.lax.psum(packed(uncut), "data"), uncut)
        remaining = iter(whole.gradients)
        return whole._replace(
            gradients=[
                next(remaining) if dim is None else jax.lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True)
                for g, dim in by_dim
            ]
        )

    def _take_shares(self, arrays: list[Any]) -> list[Any]:
        def share(array: Any, dim: int) -> Any:
            size = array.shape[dim] // self._mesh.size
            return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index("data") * size, size, dim)

        return [a if dim is None else share(a, dim) for a, dim in zip(arrays, self._dims, strict=True)]

    def _gather(self, shares: list[Any]) -> list[Any]:
        return [
            share if dim is None else jax.lax.all_gather(share, "data", axis=dim, tiled=True)
            for share, dim in zip(shares, self._dims, strict=True)
        ]

    def _local_sums(self, values: Values, batches: Batch) -> Sums:
        """Sums over this device's logical replicas, one after the other."""

        def add_leaf(sums: Sums, batch: Batch) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, sums, self._leaf(values, batch)), None

        first, n = self._leaf(values, at(batches, 0)), jax.tree.leaves(batches)[0].shape[0]
        if n == 1:
            return first
        return jax.lax.scan(add_leaf, first, jax.tree.map(lambda a: a[1:], batches))[0]


def packed(sums: Sums) -> list[Any]:
    """The arrays of sums: small ones end to end in one, for each that is moved has a latency of its own; then large."""
    leaves = jax.tree.leaves(sums)
    small = [leaf.ravel() for leaf in leaves if leaf.size < _LARGE]
    return [jnp.concatenate(small), *(leaf for leaf in leaves if leaf.size >= _LARGE)]


def unpacked(arrays: list[Any], like: Sums) -> Sums:
    """The sums that were packed, of the shapes of others."""
    leaves, structure = jax.tree.flatten(like)
    sizes = [leaf.size for leaf in leaves if leaf.size < _LARGE]
    small, large = iter(jnp.split(arrays[0], np.cumsum(sizes)[:-1])), iter(arrays[1:])
    found = [next(small if leaf.size < _LARGE else large).reshape(leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def shares_threads(mesh: jax.sharding.Mesh) -> bool:
    """Whether devices share threads, so that collectives of several programs in flight would deadlock."""
    return bool(mesh.size > 1 and mesh.devices.flat[0].platform == "cpu")


def at(block: Block, *index: Any) -> Batch:
    """The part of a block at an index of its leading dims."""
    return jax.tree.map(lambda a: a[index], block)


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
