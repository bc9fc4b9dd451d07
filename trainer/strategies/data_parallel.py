"""Compiled steps on JAX where every device has all of the model.

Legend of shapes: K steps of a block, V logical replicas, R devices, n = V / R replicas of one device,
b examples of a replica.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch
from trainer.strategies.base import Block, quickest
from trainer.strategies.jax_arrays import REPLICATED, placed, shares_threads
from trainer.strategies.jax_step import Leaf, Tally, Update
from trainer.sums import Sums, Totals, Values

_LARGE = 2**16  # elements; to copy fewer takes less time than a message's latency


class OneProgram:
    """A loop whose steps are calls of one program.

    Args:
      mesh: of the devices.
      apart: whether each step is a call of its own.
    """

    program: Any  # (values, totals, block, int32 (3,): first step of the block, how many, number of the first) -> both

    def __init__(self, mesh: jax.sharding.Mesh, apart: bool) -> None:
        self.mesh, self.apart = mesh, apart
        self.whole = NamedSharding(mesh, REPLICATED)  # how lies what every device has the whole of
        self._totals: Totals | None = None  # of the last call
        self._shares_threads = shares_threads(mesh)

    def lower(self, values: Values, block: Block, totals: Totals) -> list[list[jax.stages.Lowered]]:
        """What is called with such a block."""
        return [[self.program.lower(values, placed(totals, self.whole), block, np.zeros(3, np.int32))]]

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        # Fresh totals and those of an earlier call must look alike, or JAX compiles twice.
        if totals is not self._totals:
            totals = placed(totals, self.whole)
        new_values: Values | None = None
        length = 1 if self.apart else count
        for i in range(0, count, length):
            # One array of three numbers, for each array takes a call as long as a small step's arithmetic.
            numbers = np.array([first + i, length, step + i], np.int32)
            new_values, totals = self.program(new_values or values, totals, block, numbers)
            if self._shares_threads:
                jax.block_until_ready(totals)
        self._totals = totals
        return new_values, totals


class FastLoop(OneProgram):
    """Steps that devices add up by the backend's collectives, all that are asked for in one program, or each apart.

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
      apart: whether each step is a call of its own.
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
        *,
        apart: bool = False,
    ) -> None:
        super().__init__(mesh, apart)
        self._leaf, self._update, self._tally = leaf, update, tally
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

    def exchange(self, floats: int) -> float:
        """See Strategy.exchange."""
        add = functools.partial(jax.lax.psum, axis_name="data")
        compiled = jax.jit(
            jax.shard_map(add, mesh=self.mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
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
        start = values, totals
        values, totals = one(0, start) if self.apart else jax.lax.fori_loop(0, count, one, start)
        return (values if self._update else None), totals

    # What follows runs on one device.

    def _sums_over_devices(self, values: Values, batches: Batch) -> Sums:
        sums = self._local_sums(values, batches)
        if self.mesh.size == 1:  # XLA's CPU compiler would keep a sum over one device, as a copy
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
            size = array.shape[dim] // self.mesh.size
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


def at(block: Block, *index: Any) -> Batch:
    """The part of a block at an index of its leading dims."""
    return jax.tree.map(lambda a: a[index], block)
