"""Compiled steps on JAX where every device has all variables: a fast loop, and an exact one.

Legend of shapes: K steps of a block, V logical replicas, R devices, n = V / R replicas of one device,
b examples of a replica, N floats in all Sums of a replica.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch
from trainer.strategies.base import Block
from trainer.sums import Sums, Totals, Values
from trainer.tree import Tree

_REPLICATED = PartitionSpec()
_BY_REPLICA = PartitionSpec(None, "data")  # (K, V, ...)
_BY_DEVICE = PartitionSpec("data")  # (R, ...), one device's own value each
_UNSTACKED = 4  # steps that are unstacked at a time
_CHUNK = 2**20  # floats that a device gathers from all others at a time

Leaf = Callable[[Values, Batch], Sums]  # (values, one replica's batch) -> Sums
Update = Callable[[Values, Sums], Values]  # (values, complete Sums) -> new values
Tally = Callable[[Totals, Sums, Any], Totals]  # (totals, complete Sums, step) -> new totals


class FastLoop:
    """All steps of a call in one program; devices add by the backend's all-reduce.

    Args:
      mesh: one axis, data, of R devices.
      replicas: V.
      leaf: what a logical replica computes.
      update: what follows from the sums; None: the values stay, and are returned as None.
      tally: adds a step to the totals.
    """

    def __init__(self, mesh: jax.sharding.Mesh, replicas: int, leaf: Leaf, update: Update | None, tally: Tally) -> None:
        self._mesh, self._leaf, self._update, self._tally = mesh, leaf, update, tally
        in_specs = (_REPLICATED, _REPLICATED, _BY_REPLICA, *[_REPLICATED] * 3)
        mapped = jax.shard_map(self._steps, mesh=mesh, in_specs=in_specs, out_specs=_REPLICATED, check_vma=False)
        self.program = jax.jit(mapped, donate_argnums=(0,) if update else ())

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        # Fresh totals and those of an earlier call must look alike, or JAX compiles twice.
        totals = placed(totals, NamedSharding(self._mesh, _REPLICATED))
        return self.program(values, totals, block, *map(np.int32, (first, count, step)))

    # What follows runs on one device.

    def _steps(self, values: Values, totals: Totals, block: Block, first: Any, count: Any, step: Any) -> Any:
        def one(i: Any, carry: tuple[Values, Totals]) -> tuple[Values, Totals]:
            values, totals = carry
            sums = self._local_sums(values, _at(block, first + i))
            if self._mesh.size > 1:  # XLA's CPU compiler would keep a sum over one device, as a copy
                sums = jax.lax.psum(sums, "data")
            return self._update(values, sums) if self._update else values, self._tally(totals, sums, step + i)

        # The number of turns is not known to the compiler: one program for any.
        values, totals = jax.lax.fori_loop(0, count, one, (values, totals))
        return (values if self._update else None), totals

    def _local_sums(self, values: Values, batches: Batch) -> Sums:
        """Sums over this device's logical replicas, one after the other."""

        def add_leaf(sums: Sums, batch: Batch) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, sums, self._leaf(values, batch)), None

        first, n = self._leaf(values, _at(batches, 0)), jax.tree.leaves(batches)[0].shape[0]
        if n == 1:
            return first
        return jax.lax.scan(add_leaf, first, jax.tree.map(lambda a: a[1:], batches))[0]


class ExactLoop:
    """Sums in the order of the tree, and the same programs on any number of devices, hence the same bits.

    XLA compiles a program for one device and a partitioned one differently, and a loop of one turn
    otherwise than one of four. So the programs here are for a single device, see neither R nor n, and
    are called on each device in turn; between devices, sums are only moved and added.

    Args:
      mesh, replicas, leaf, update, tally: as in FastLoop.
    """

    def __init__(self, mesh: jax.sharding.Mesh, replicas: int, leaf: Leaf, update: Update | None, tally: Tally) -> None:
        self._mesh, self._leaf, self._update, self._tally = mesh, leaf, update, tally
        self._devices = mesh.devices.size
        # Virtual devices share threads, so that a collective in flight beside another program deadlocks. Those
        # of one process share memory, too, where a copy is all that a move takes.
        self._virtual = mesh.devices.flat[0].platform == "cpu" and self._devices > 1
        self._copies = self._virtual and self._devices == len(mesh.local_devices)
        local = replicas // self._devices
        self._node_size = Tree.node_size(local)  # leaves of each node of a device's
        self._local_nodes = local // self._node_size
        self._sums: Any = None  # the structure of Sums
        self._one_leaf = jax.jit(lambda values, batch: jax.flatten_util.ravel_pytree(self._leaf(values, batch))[0])
        self._unstack = jax.jit(_unstack)
        self._block: Any = None  # the last one, its parts on the devices, and batches of some of its steps
        self._parts: list[Block] = []
        self._batches: dict[int, list[list[Batch]]] = {}  # step: [device][replica]
        self._finish = jax.jit(self._finish_step, donate_argnums=(0,) if update else ())

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        if self._sums is None:
            batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), block)
            self._sums = jax.eval_shape(self._leaf, values, batch)
        if self._block is not block:
            self._block, self._parts, self._batches = block, per_device(block), {}
        whole = NamedSharding(self._mesh, _REPLICATED)
        on_devices = list(zip(per_device(values), per_device(placed(totals, whole)), strict=True))
        before: Any = None
        for i in range(count):
            local = [
                self._local_sums(values, batches)
                for (values, _), batches in zip(on_devices, self._batches_of(first + i), strict=True)
            ]
            number = np.int32(step + i)
            on_devices = [
                self._finish(values, totals, total, number)
                for (values, totals), total in zip(on_devices, self._exchange(local), strict=True)
            ]
            done = [totals for _, totals in on_devices]
            if self._virtual:  # with copies, a step is begun while the one before goes on
                jax.block_until_ready(before if self._copies else done)
            before = done
        new_values, totals = (_joined(whole, part) for part in zip(*on_devices, strict=True))
        return new_values if self._update else None, totals

    def _batches_of(self, step: int) -> list[list[Batch]]:
        """The replicas' batches of a step of the block, by device."""
        if step not in self._batches:
            # A few steps at a time: XLA compiles a program of many results slowly.
            start = step // _UNSTACKED * _UNSTACKED
            by_device = [self._unstack(part, start) for part in self._parts]
            self._batches = {start + i: list(batches) for i, batches in enumerate(zip(*by_device, strict=True))}
        return self._batches[step]

    def _local_sums(self, values: Values, batches: list[Batch]) -> list[Any]:
        """The nodes that one device's logical replicas add up to, each (N,)."""
        found = []
        for first in range(0, len(batches), self._node_size):
            nodes: list[Any] = [None] * self._node_size.bit_length()
            for r, batch in enumerate(batches[first : first + self._node_size]):
                carries = (~r & (r + 1)).bit_length() - 1  # trailing ones
                nodes = Tree.push(nodes, self._one_leaf(values, batch), carries, jnp.add)
            found.append(nodes[-1])
        return found

    def _exchange(self, nodes: list[list[Any]]) -> list[Any]:
        """The sum of all devices' nodes, (N,) on each device."""
        if self._devices == 1:
            return [Tree.add_up(nodes[0], jnp.add)]
        if self._copies:
            devices = list(self._mesh.devices.flat)
            on_first = jax.device_put([node for of_device in nodes for node in of_device], devices[0])
            return jax.device_put([_add_up(on_first)] * len(devices), devices)
        if self._virtual:
            jax.block_until_ready(nodes)
        local = NamedSharding(self._mesh, _BY_DEVICE)
        joined = [_joined(local, [of_device[j] for of_device in nodes]) for j in range(self._local_nodes)]
        return per_device(self._sum_over_devices(joined))

    @functools.cached_property
    def _sum_over_devices(self) -> Any:
        def sum_over_devices(nodes: list[Any]) -> Any:
            if len(nodes) > 1 or self._devices & (self._devices - 1):
                # The tree runs across the devices: each adds up all nodes, a chunk at a time.
                cuts = np.arange(_CHUNK, nodes[0].size, _CHUNK)
                return jnp.concatenate([add_up(*chunks) for chunks in zip(*(jnp.split(n, cuts) for n in nodes))])
            # Partners at distance 1, 2, 4 ... exchange their sums: pairs, then pairs of pairs. Both
            # add the same two numbers, and IEEE addition commutes, so all devices have the same bits.
            total, distance = nodes[0], 1
            while distance < self._devices:
                total += jax.lax.ppermute(total, "data", [(d, d ^ distance) for d in range(self._devices)])
                distance *= 2
            return total

        def add_up(*chunks: Any) -> Any:
            gathered = jax.lax.all_gather(jnp.stack(chunks), "data")  # (R, nodes of a device, chunk)
            return Tree.add_up(list(gathered.reshape(-1, *chunks[0].shape)), jnp.add)

        mapped = jax.shard_map(
            sum_over_devices, mesh=self._mesh, in_specs=_BY_DEVICE, out_specs=_REPLICATED, check_vma=False
        )
        return jax.jit(mapped)

    def _finish_step(self, values: Values, totals: Totals, flat: Any, step: Any) -> tuple[Values, Totals]:
        leaves, structure = jax.tree.flatten(self._sums)
        parts = jnp.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        sums = jax.tree.unflatten(structure, shaped)
        return self._update(values, sums) if self._update else values, self._tally(totals, sums, step)


_add_up = jax.jit(lambda nodes: Tree.add_up(nodes, jnp.add))


def _at(block: Block, *index: Any) -> Batch:
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


def _unstack(block: Block, start: int) -> list[list[Batch]]:
    """(K, n, b, ...), K a power of two -> batches of one replica each of the steps from `start`, [step][replica]."""
    steps, replicas = jax.tree.leaves(block)[0].shape[:2]
    few = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, min(steps, _UNSTACKED)), block)
    return [[_at(few, i, r) for r in range(replicas)] for i in range(min(steps, _UNSTACKED))]


def per_device(tree: Any) -> list[Any]:
    """Each device's own part of global arrays, as arrays of that device."""
    leaves, structure = jax.tree.flatten(tree)
    parts = zip(*([shard.data for shard in leaf.addressable_shards] for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, part) for part in parts]


def _joined(sharding: NamedSharding, trees: Any) -> Any:
    """Global arrays of each device's part: laid end to end, or one value that all have."""
    sharded = sharding.spec != _REPLICATED
    factor = len(sharding.mesh.devices.flat) if sharded else 1

    def join(*parts: Any) -> Any:
        shape = (parts[0].shape[0] * factor, *parts[0].shape[1:]) if sharded else parts[0].shape
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(join, *trees)
