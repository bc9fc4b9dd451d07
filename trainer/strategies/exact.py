"""Compiled steps on JAX whose bits depend neither on the number of devices nor on that of processes.

Legend of shapes: K steps of a block, V logical replicas, R devices, n = V / R replicas of one device,
b examples of a replica. A node is the packed Sums of some replicas that lie together in the tree: a list of arrays.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch
from trainer.strategies.base import Block, quickest
from trainer.strategies.data_parallel import at, packed, unpacked
from trainer.strategies.jax_arrays import REPLICATED, assembled, copied, joined, per_device, placed, shares_threads
from trainer.strategies.jax_step import Leaf, Tally, Update
from trainer.sums import Totals, Values
from trainer.tree import Tree

Node = list[Any]
_BY_DEVICE = PartitionSpec("data")  # (R, ...), one device's own value each
_STEPS, _ARRAYS = 4, 48  # that are unstacked at a time: XLA takes some 10 ms to compile each result of a program
_CHUNK = 2**20  # floats that a device gathers from all others at a time


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
        # Virtual devices of one process share memory, too, where a copy is all that a move takes.
        self._virtual = shares_threads(mesh)
        self._copies = self._virtual and self._devices == len(mesh.local_devices)
        local = replicas // self._devices
        self._node_size = Tree.node_size(local, self._devices)  # leaves of each node of a device's
        self._local_nodes = local // self._node_size
        self._sums: Any = None  # the structure of Sums
        self._one_leaf = jax.jit(self._packed_leaf)
        self._unstack = jax.jit(_unstack)
        self._block: Any = None  # the last one, its parts on the devices, and batches of some of its steps
        self._parts: list[Block] = []
        self._batches: dict[int, list[list[Batch]]] = {}  # step: [device][replica]
        self._finish = jax.jit(self._finish_step, donate_argnums=(0,) if update else ())

    def lower(self, values: Values, block: Block, totals: Totals) -> list[list[jax.stages.Lowered]]:
        """What each device calls at each step; the length of a block changes nothing of it."""
        if self._sums is not None:
            return []
        whole = NamedSharding(self._mesh, REPLICATED)
        parts = per_device(values), per_device(placed(totals, whole)), per_device(block)
        return [
            self._lower(mine, sums, self._unstack(part, 0, 0)[0][0]) for mine, sums, part in zip(*parts, strict=True)
        ]

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        if self._block is not block:
            self._block, self._parts, self._batches = block, per_device(block), {}
        whole = NamedSharding(self._mesh, REPLICATED)
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
        by_device, totals_by_device = zip(*on_devices, strict=True)
        totals = joined(whole, totals_by_device)
        return _joined_like(values, by_device) if self._update else None, totals

    def exchange(self, floats: int) -> float:
        """See Strategy.exchange."""
        vector = np.zeros(floats, np.float32)
        nodes = [[jax.device_put([vector], d) for _ in range(self._local_nodes)] for d in self._mesh.local_devices]
        return quickest(lambda: jax.block_until_ready(self._exchange(nodes)))

    def _lower(self, values: Values, totals: Totals, batch: Batch) -> list[jax.stages.Lowered]:
        self._sums = jax.eval_shape(self._leaf, values, batch)
        place = jax.tree.leaves(values)[0].sharding
        shapes = jax.eval_shape(self._one_leaf, values, batch)
        node = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in shapes]
        return [self._one_leaf.lower(values, batch), self._finish.lower(values, totals, node, np.int32(0))]

    def _batches_of(self, step: int) -> list[list[Batch]]:
        """The replicas' batches of a step of the block, by device."""
        if step not in self._batches:
            length, replicas = jax.tree.leaves(self._parts)[0].shape[:2]
            steps, few = _unstacked(self._parts[0])
            start = min(step // steps * steps, length - steps)
            by_device = []
            for part in self._parts:
                found = (self._unstack(part, start, first) for first in range(0, replicas, few))
                by_device.append([list(itertools.chain(*of_step)) for of_step in zip(*found, strict=True)])
            self._batches = {start + i: list(batches) for i, batches in enumerate(zip(*by_device, strict=True))}
        return self._batches[step]

    def _local_sums(self, values: Values, batches: list[Batch]) -> list[Node]:
        """The nodes that one device's logical replicas add up to."""
        found = []
        for first in range(0, len(batches), self._node_size):
            nodes: list[Any] = [None] * self._node_size.bit_length()
            for r, batch in enumerate(batches[first : first + self._node_size]):
                carries = (~r & (r + 1)).bit_length() - 1  # trailing ones
                nodes = Tree.push(nodes, self._one_leaf(values, batch), carries, _add)
            found.append(Tree.fold(nodes, self._node_size, _add))
        return found

    def _exchange(self, nodes: list[list[Node]]) -> list[Node]:
        """The sum of all devices' nodes, on each device."""
        if self._devices == 1:
            return nodes[0]
        if self._copies:
            first, *others = self._mesh.devices.flat
            distant = [node for of_device in nodes[1:] for node in of_device]
            total = _add_up(nodes[0] + copied(distant, [first] * len(distant)))
            return [total, *copied([total] * len(others), others)]
        if self._virtual:
            jax.block_until_ready(nodes)
        local = NamedSharding(self._mesh, _BY_DEVICE)
        nodes_of_all = [joined(local, [of_device[j] for of_device in nodes]) for j in range(self._local_nodes)]
        return per_device(self._sum_over_devices(nodes_of_all))

    @functools.cached_property
    def _sum_over_devices(self) -> Any:
        def sum_over_devices(nodes: list[Node]) -> Node:
            # End to end, for XLA sends one array after the other, each with a latency of its own.
            flat, (taken_apart, *_) = zip(*map(jax.flatten_util.ravel_pytree, nodes), strict=True)
            return taken_apart(summed(flat))

        def summed(nodes: Sequence[Any]) -> Any:
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
            sum_over_devices, mesh=self._mesh, in_specs=_BY_DEVICE, out_specs=REPLICATED, check_vma=False
        )
        return jax.jit(mapped)

    def _packed_leaf(self, values: Values, batch: Batch) -> Node:
        return packed(self._leaf(values, batch))

    def _finish_step(self, values: Values, totals: Totals, node: Node, step: Any) -> tuple[Values, Totals]:
        sums = unpacked(node, self._sums)
        totals = self._tally(totals, values, sums, step)
        return self._update(values, sums) if self._update else values, totals


def _joined_like(values: Values, by_device: Sequence[Values]) -> Values:
    """What each device has, as global arrays with the values' very shardings: equal ones would be placed anew."""

    def join(old: jax.Array, *parts: jax.Array) -> jax.Array:
        return assembled(old.aval, old.sharding, *parts)

    return Values(*jax.tree.map(join, values, *by_device))


def _added(a: Node, b: Node) -> Node:
    return jax.tree.map(jnp.add, a, b)


_add = jax.jit(_added)
_add_up = jax.jit(lambda nodes: Tree.add_up(nodes, _added))


def _unstacked(part: Block) -> tuple[int, int]:
    """How many steps of a device's part of a block, and how many of its replicas, are unstacked at a time."""
    arrays = jax.tree.leaves(part)
    length, replicas = arrays[0].shape[:2]
    batches = max(1, _ARRAYS // len(arrays))
    few = max(count for count in range(1, batches + 1) if replicas % count == 0)
    return min(length, _STEPS, batches // few), few


def _unstack(block: Block, step: int, replica: int) -> list[list[Batch]]:
    """(K, n, b, ...) -> batches of one replica each, from a step and a replica on, [step][replica]."""
    sizes = _unstacked(block)

    def cut(array: Any) -> Any:
        for dim, (start, size) in enumerate(zip((step, replica), sizes, strict=True)):
            array = jax.lax.dynamic_slice_in_dim(array, start, size, dim)
        return array

    few = jax.tree.map(cut, block)
    return [[at(few, i, r) for r in range(sizes[1])] for i in range(sizes[0])]
