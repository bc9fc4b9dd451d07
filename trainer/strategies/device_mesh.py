"""Keras on JAX: one device, or a keras.distribution.DeviceMesh whose data axis shares the logical replicas.

One program per device (shard_map): it loops over its own logical replicas, then over steps. Legend of
shapes: K steps of a block, V logical replicas, n = V / R of one device, b examples of a replica.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch, Pipeline
from trainer.config import Config
from trainer.errors import UserError
from trainer.program import Program
from trainer.step import Sums, Totals, Tree, Values, add_step, mean_gradients, mean_state
from trainer.strategies.base import Block, Strategy

_REPLICATED = PartitionSpec()
_BY_REPLICA = PartitionSpec(None, "data")  # (K, V, ...)
_BY_DEVICE = PartitionSpec("data")  # (R, ...), one device's own value each


def create(config: Config) -> "DeviceMesh":
    """A mesh of real devices, or of virtual CPUs where those are too few."""
    wanted = 1 if config.strategy == "one_device" else config.devices
    tf.config.set_visible_devices([], "GPU")  # TensorFlow only reads data here; the GPUs are JAX's
    # Takes effect because no JAX device has been asked for yet; costs nothing if accelerators are used.
    jax.config.update("jax_num_cpu_devices", max(1, wanted))
    real = [d for d in jax.devices() if d.platform != "cpu"]
    wanted = wanted or max(1, len(real))
    if len(real) >= wanted:
        devices, description = real[:wanted], f"{wanted} of {len(real)} {real[0].device_kind}"
    else:
        devices = jax.devices("cpu")[:wanted]
        description = (
            "1 CPU" if wanted == 1 else f"{wanted} virtual CPU devices (this machine has {len(real)} accelerators)"
        )
        jax.config.update("jax_default_device", devices[0])
    if len(devices) < wanted:
        raise UserError(
            "devices",
            wanted,
            f"JAX made {len(devices)} CPU devices only",
            "set XLA_FLAGS=--xla_force_host_platform_device_count before the start, or unset it",
        )
    return DeviceMesh(devices, description)


class DeviceMesh(Strategy):
    """Synchronous data parallelism over the data axis of a keras.distribution.DeviceMesh.

    Args:
      devices: JAX devices.
      description: the devices in words.
    """

    def __init__(self, devices: list[jax.Device], description: str) -> None:
        self.devices = len(devices)
        self.description = f"{description}, DeviceMesh(data={self.devices})"
        self._on_cpu = devices[0].platform == "cpu"
        # Adding in the tree's order makes the bits independent of the devices. Virtual devices are there
        # to show just that, and lose no fast interconnect by it. Two devices are in order anyhow.
        power_of_two = self.devices & (self.devices - 1) == 0
        self.in_tree_order = self._on_cpu and power_of_two and self.devices > 2
        names = [f"{d.platform}:{d.id}" for d in devices]
        self._mesh_of_keras = keras.distribution.DeviceMesh((self.devices,), ("data",), names)
        self._mesh = jax.sharding.Mesh(np.array(devices), ("data",))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        distribution = keras.distribution.DataParallel(self._mesh_of_keras, auto_shard_dataset=False)
        return distribution.scope()

    def shares(self, replicas: int) -> list[range]:
        return [range(replicas)]  # JAX splits one array over its devices by itself

    def feed(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        sharding = NamedSharding(self._mesh, _BY_REPLICA)
        on_device = (jax.device_put(block, sharding) for block in pipeline.blocks(first_block))
        ahead: collections.deque[Block] = collections.deque()
        for block in on_device:  # one block's transfer overlaps the steps of the block before
            ahead.append(block)
            if len(ahead) == 2:
                yield ahead.popleft()
        yield from ahead

    def compile(self, program: Program) -> None:
        self._program = program
        self._objective = program.objective
        self._replicas = program.replicas
        self._variables = Values(
            list(program.model.trainable_variables),
            list(self._objective.state_variables),
            list(program.optimizer.variables),
        )
        whole = NamedSharding(self._mesh, _REPLICATED)
        for variable in jax.tree.leaves(self._variables):
            variable.assign(jax.device_put(variable.value, whole))
        self._train = _Loop(self, self._gradient_sums, self._update)
        self._evaluate = _Loop(self, self._forward_sums, None)

    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        values, totals = self._train(self._values(), block, first, count, step, totals)
        assert values is not None  # the training loop updates
        for variables, new in zip(self._variables, values, strict=True):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)
        return totals

    def evaluate(self, block: Block, count: int, totals: Totals) -> Totals:
        return self._evaluate(self._values(), block, 0, count, 0, totals)[1]

    def trace(self, directory: str, start: bool) -> None:
        if start:
            jax.profiler.start_trace(directory)
        else:
            jax.profiler.stop_trace()

    def _values(self) -> Values:
        return Values(*([v.value for v in variables] for variables in self._variables))

    def _gradient_sums(self, values: Values, batch: Batch) -> Sums:
        def objective(trainable: list[Any]) -> tuple[Any, Sums]:
            objective, sums = self._objective(trainable, values.state, batch, training=True)
            return objective * self._loss_scale(values), sums

        gradients, sums = jax.grad(objective, has_aux=True)(values.trainable)
        return sums._replace(gradients=[g.astype(jnp.float32) for g in gradients])

    def _loss_scale(self, values: Values) -> Any:
        for variable, value in zip(self._variables.optimizer, values.optimizer, strict=True):
            if variable is getattr(self._program.optimizer, "dynamic_scale", None):  # mixed_float16
                return value
        return 1.0

    def _forward_sums(self, values: Values, batch: Batch) -> Sums:
        return self._objective(values.trainable, values.state, batch, training=False)[1]._replace(state=[])

    def _update(self, values: Values, sums: Sums) -> Values:
        trainable, optimizer = self._program.optimizer.stateless_apply(
            values.optimizer, mean_gradients(sums, values.trainable), values.trainable
        )
        return Values(trainable, mean_state(sums, values.state, self._replicas), optimizer)


class _Loop:
    """Compiled steps: over each step's logical replicas, sum by the tree, then update.

    Loops run on the devices, in one program, unless convolutions are to run on CPUs: XLA's CPU
    compiler takes its fast convolutions in a program's entry only, and is 10 times slower inside a
    loop's body. Then the host loops and calls three programs. Either way a step is the same
    computation, so where a run was cut into calls does not show in its bits.

    Args:
      strategy: gives mesh, replicas and devices.
      leaf: (values, one replica's batch) -> Sums.
      update: (values, complete Sums) -> values, which are donated; None: the values stay, and are
        returned as None.
    """

    def __init__(
        self,
        strategy: DeviceMesh,
        leaf: Callable[[Values, Batch], Sums],
        update: Callable[[Values, Sums], Values] | None,
    ) -> None:
        self._leaf, self._update = leaf, update
        self._donate = (0,) if update else ()
        self._mesh, self._on_cpu = strategy._mesh, strategy._on_cpu
        self._devices, self._local_replicas = strategy.devices, strategy._replicas // strategy.devices
        self._in_tree_order = strategy.in_tree_order
        self._loops_on_device: bool | None = None

    def __call__(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        if self._loops_on_device is None:
            one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), block)
            self._loops_on_device = not (
                self._on_cpu and "conv_general" in str(jax.make_jaxpr(self._leaf)(values, one))
            )
        # Fresh totals and those of an earlier call must look alike, or JAX compiles twice.
        totals = jax.device_put(totals, NamedSharding(self._mesh, _REPLICATED))
        run = self._on_device if self._loops_on_device else self._on_host
        new_values, totals = run(values, block, first, count, step, totals)
        self._settle(totals)
        return new_values, totals

    def _settle(self, result: Any) -> None:
        """Waits, where devices are virtual: they share threads, so that a collective in flight beside
        another program deadlocks."""
        if self._on_cpu and self._devices > 1:
            jax.block_until_ready(result)

    def _on_device(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        numbers = map(np.int32, (first, count, step, self._local_replicas))
        return self._steps(values, totals, block, *numbers)

    def _on_host(
        self, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        for i in range(count):
            nodes: list[Any] = [None] * Tree.levels(self._local_replicas)
            for r in range(self._local_replicas):
                batch = self._slice(block, np.int32(first + i), np.int32(r))
                nodes = Tree.push(nodes, self._one_leaf(values, batch), _trailing_ones(r), self._add)
            root = Tree.root(nodes, self._local_replicas, self._add)
            self._settle(root)
            new_values, totals = self._finish(values, totals, root, np.int32(step + i))
            values = new_values or values
            self._settle(totals)
        return values if self._update else None, totals

    def _program(self, function: Any, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    @functools.cached_property
    def _steps(self) -> Any:
        def steps(values: Values, totals: Totals, block: Block, first: Any, count: Any, step: Any, n: Any) -> Any:
            def one(i: Any, carry: tuple[Values, Totals]) -> tuple[Values, Totals]:
                values, totals = carry
                local = self._local_sums(values, block, first + i, n)
                return self._finish_step(values, totals, local, step + i)

            # The number of turns is not known to the compiler: one program for all, and the same bits.
            values, totals = jax.lax.fori_loop(0, count, one, (values, totals))
            return (values if self._update else None), totals

        in_specs = (_REPLICATED, _REPLICATED, _BY_REPLICA, *[_REPLICATED] * 4)
        return self._program(steps, in_specs, _REPLICATED, self._donate)

    @functools.cached_property
    def _slice(self) -> Any:
        def cut(block: Block, i: Any, r: Any) -> Batch:
            return jax.tree.map(lambda a: a[None], _at(block, i, r))

        return self._program(cut, (_BY_REPLICA, _REPLICATED, _REPLICATED), _BY_DEVICE)

    @functools.cached_property
    def _one_leaf(self) -> Any:
        # Takes a batch, not a block: so its program, and with it every rounding, is the same on
        # any number of devices.
        def leaf(values: Values, batch: Batch) -> Any:
            sums = self._leaf(values, jax.tree.map(lambda a: a[0], batch))
            return jax.tree.map(lambda a: a[None], sums)

        return self._program(leaf, (_REPLICATED, _BY_DEVICE), _BY_DEVICE)

    @functools.cached_property
    def _add(self) -> Any:
        return self._program(_add, _BY_DEVICE, _BY_DEVICE)

    @functools.cached_property
    def _finish(self) -> Any:
        def finish(values: Values, totals: Totals, root: Any, step: Any) -> Any:
            local = jax.tree.map(lambda a: a[0], root)
            values, totals = self._finish_step(values, totals, local, step)
            return (values if self._update else None), totals

        in_specs = (_REPLICATED, _REPLICATED, _BY_DEVICE, _REPLICATED)
        return self._program(finish, in_specs, _REPLICATED, self._donate)

    # What follows runs on one device.

    def _local_sums(self, values: Values, block: Block, i: Any, n: Any) -> Sums:
        """Sums over this device's n logical replicas, by the tree.

        The number of turns is hidden from the compiler: a loop of one turn would be unrolled and
        fused otherwise than a loop of four, and the bits would depend on the number of devices.
        """
        levels = Tree.levels(self._local_replicas)
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), block)  # (K * n, b, ...)
        shapes = jax.eval_shape(lambda: self._leaf(values, _at(flat, 0)))
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add_leaf(r: Any, nodes: list[Sums]) -> list[Sums]:
            leaf = self._leaf(values, _at(flat, i * n + r))
            branches = [
                functools.partial(lambda c, nodes, leaf: Tree.push(nodes, leaf, c, _add), c) for c in range(levels)
            ]
            return jax.lax.switch(_trailing_ones_traced(r, levels), branches, nodes, leaf)

        nodes = jax.lax.fori_loop(0, n, add_leaf, [nothing] * levels)
        return Tree.root(nodes, self._local_replicas, _add)

    def _finish_step(self, values: Values, totals: Totals, local: Sums, step: Any) -> tuple[Values, Totals]:
        sums = jax.lax.optimization_barrier(self._sum_over_devices(local))
        return self._update(values, sums) if self._update else values, add_step(totals, sums, step)

    def _sum_over_devices(self, local: Sums) -> Sums:
        if not self._in_tree_order:
            return jax.lax.psum(local, "data")
        # Partners at distance 1, 2, 4 ... exchange their sums: pairs, then pairs of pairs. Both add
        # the same two numbers, and IEEE addition commutes, so all devices have the same bits.
        flat, unravel = jax.flatten_util.ravel_pytree(local)
        distance = 1
        while distance < self._devices:
            partners = [(d, d ^ distance) for d in range(self._devices)]
            flat = flat + jax.lax.ppermute(flat, "data", partners)
            distance *= 2
        return unravel(flat)


def _at(block: Block, *index: Any) -> Batch:
    """The part of a block at an index of its leading dims."""
    return jax.tree.map(lambda a: a[index], block)


def _add(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)


def _trailing_ones(i: int) -> int:
    return (~i & (i + 1)).bit_length() - 1


def _trailing_ones_traced(i: Any, levels: int) -> Any:
    bits = i >> jnp.arange(levels) & 1
    return jnp.sum(jnp.cumprod(bits))
