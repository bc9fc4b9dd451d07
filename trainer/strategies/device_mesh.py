"""Keras on JAX: one device, or a keras.distribution.DeviceMesh whose data axis shares the logical replicas.

One program per device (shard_map): it loops over its own logical replicas, then over steps. Legend of
shapes: K steps of a block, V logical replicas, n = V / R of one device, b examples of a replica.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch, Pipeline
from trainer.config import Config
from trainer.errors import UserError
from trainer.program import Program
from trainer.step import Sums, Totals, Values, mean_gradients, mean_state
from trainer.strategies.base import Block, Strategy
from trainer.strategies.data_parallel import ExactLoop, FastLoop, Leaf

_REPLICATED = PartitionSpec()
_BY_REPLICA = PartitionSpec(None, "data")  # (K, V, ...)


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
    return DeviceMesh(devices, description, config.exact)


class DeviceMesh(Strategy):
    """Synchronous data parallelism over the data axis of a keras.distribution.DeviceMesh.

    Args:
      devices: JAX devices.
      description: the devices in words.
      exact: whether sums follow the tree on accelerators, too.
    """

    def __init__(self, devices: list[jax.Device], description: str, exact: bool) -> None:
        self.devices = len(devices)
        self.description = f"{description}, DeviceMesh(data={self.devices})"
        self._on_cpu = devices[0].platform == "cpu"
        self._exact = exact
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
        # Virtual devices are there to show that the devices don't matter, and lose no fast interconnect.
        self._exact |= self._on_cpu and program.replicas > 1
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
        self._loops: dict[bool, ExactLoop | FastLoop] = {}

    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        loop = self._loop(True, block)
        values, totals = loop(self._values(), block, first, count, step, totals)
        assert values is not None  # the training loop updates
        for variables, new in zip(self._variables, values, strict=True):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)
        return totals

    def evaluate(self, block: Block, count: int, totals: Totals) -> Totals:
        return self._loop(False, block)(self._values(), block, 0, count, 0, totals)[1]

    def _loop(self, training: bool, block: Block) -> ExactLoop | FastLoop:
        """The compiled steps; made at the first block, which shows what the model computes."""
        if training not in self._loops:
            leaf = self._gradient_sums if training else self._forward_sums
            update = self._update if training else None
            exact = self._exact or (self._on_cpu and self._has_convolutions(leaf, block))
            loop = ExactLoop if exact else FastLoop
            self._loops[training] = loop(self._mesh, self._program.replicas, leaf, update)
        return self._loops[training]

    def _has_convolutions(self, leaf: Leaf, block: Block) -> bool:
        """XLA's CPU compiler takes its fast convolutions in a program's entry only: they are 10 times
        slower inside FastLoop."""
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), block)
        return "conv_general" in str(jax.make_jaxpr(leaf)(self._values(), batch))

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
