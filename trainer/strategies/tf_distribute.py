"""tf.distribute: one device, or a mirrored copy of the variables on each of several, in one or more processes.

The loop over steps and the loop over a device's logical replicas are both tf.while_loops of one
tf.function, so the host is not asked between steps.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline.pipeline import Batch, Pipeline
from input_pipeline.structure import map_structure
from trainer.cluster import ALONE, Cluster
from trainer.errors import UserError, said_by_keras
from trainer.optimizers import counters
from trainer.program import Program
from trainer.strategies import tf_flops, tf_update
from trainer.strategies.base import Block, Strategy, nothing_again, quickest
from trainer.strategies.tf_call import Compiled
from trainer.strategies.tf_sums import add_in_tree_order, add_over_processes, at, repeat, sum_of_leaves
from trainer.strategies.tf_variables import assign, let_python_read_numbers, on_host
from trainer.sums import Outcome, Sums, Totals
from trainer.tree import Tree


class TFDistribute(Strategy):
    """Synchronous training by a tf.distribute.Strategy that mirrors variables.

    Args:
      strategy: the tf.distribute strategy.
      description: its devices in words.
      exact: whether sums follow the tree over the devices, too; else the backend's all-reduce adds them.
      cluster: the processes.
    """

    can_skip = True

    def __init__(
        self, strategy: "tf.distribute.Strategy", description: str, exact: bool, cluster: Cluster = ALONE
    ) -> None:
        let_python_read_numbers()
        self._strategy = strategy
        self.devices = strategy.num_replicas_in_sync
        self._in_tree_order = exact
        self.cluster = cluster
        self.on_cpu = all("CPU" in device for device in strategy.extended.worker_devices)
        self.description = description

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._strategy.scope()

    def compile(self, program: Program) -> None:
        self._program = program
        program.to_host = on_host
        self._objective = program.objective
        self._local_replicas = program.replicas // self.devices
        self._node_size = Tree.node_size(self._local_replicas, self.devices if self._in_tree_order else 1)
        tf_update.prepare(program.optimizer)
        # XLA makes one program of the loop over steps where compile(jit_compile=True) asks for it. For one logical
        # replica only: XLA rounds otherwise, so whether it compiles must not follow from the devices.
        self._xla = program.jit_compile and program.replicas == 1 and not self._in_tree_order
        if program.jit_compile:
            self.description += ", XLA" if self._xla else ", no XLA: that is for one logical replica without --exact"
        self._train, self._evaluate = (
            Compiled(functools.partial(self._steps, one_step), self._xla or None)
            for one_step in (self._train_step, self._evaluate_step)
        )
        self._predict = tf.function(self._outputs, reduce_retracing=True, autograph=False)
        self._sum_bits = tf.function(lambda: self._strategy.run(self._bits), autograph=False)

    def feed(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        # One element per device in turn; tf.distribute hands each device its own and prefetches to it.
        blocks = self._strategy.distribute_datasets_from_function(lambda context: pipeline.dataset(first_block))
        return itertools.islice(blocks, pipeline.blocks_from(first_block))

    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        return self._call(self._train, block, np.array([first, count, step], np.int32), totals)

    def evaluate(self, block: Block, first: int, count: int, totals: Totals) -> Totals:
        return self._call(self._evaluate, block, np.array([first, count, 0], np.int32), totals)

    def _call(self, function: Compiled, *arguments: Any) -> Totals:
        """Calls a compiled function; what can't be compiled in it is told as the user's to change."""
        model = self._program.config.model
        try:
            return function(*arguments)
        except TypeError as error:
            if "out of scope" not in str(error):
                raise
            reason = f"keeps a tensor from one trace for another: {said_by_keras(error).splitlines()[-1]}"
            raise UserError("model", model, reason, "compute what it keeps by numpy, or anew in each call()") from error
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not self._xla or "XLA" not in error.message:
                raise
            reason = f"can't be compiled by XLA: {error.message.splitlines()[0]}"
            fix = "call model.compile(jit_compile=False, ...) in build()"
            raise UserError("model", model, reason, fix) from error

    def predict(self, x: Any) -> Any:
        return tf.nest.map_structure(np.asarray, self._predict(x))

    def flops(self, spec: Any) -> float:
        batch = map_structure(lambda a: tf.TensorSpec(a.shape[2:], a.dtype), spec)
        with nothing_again():
            leaf = tf.function(self._gradient_sums, autograph=False).get_concrete_function(batch)
        return tf_flops.count(leaf.graph) * self._program.replicas

    def exchange(self, floats: int) -> float:
        def add_up() -> Any:
            nodes = self._local_replicas // self._node_size
            return self._sum_over_devices([Sums(tf.zeros([floats]), [], [], [], [])] * nodes).objective[0]

        call = tf.function(lambda: self._strategy.run(add_up), autograph=False)
        return quickest(lambda: [float(x) for x in self._strategy.experimental_local_results(call())])

    def checksums(self) -> list[int]:
        if self.devices == 1:
            return []
        return [int(number) for number in self._strategy.experimental_local_results(self._sum_bits())]

    def trace(self, directory: str, start: bool) -> None:
        if start:
            tf.profiler.experimental.start(directory)
        else:
            tf.profiler.experimental.stop()

    def _outputs(self, x: Any) -> Any:
        return self._objective.outputs(*self._read_variables(), x)

    def _steps(self, one_step: Callable[[Block, Any], Outcome], block: Block, numbers: Any, totals: Totals) -> Totals:
        first, count, step = tf.unstack(numbers)

        def one(i: Any, totals: Totals) -> tuple[Any, Totals]:
            outcome = self._first_device(self._strategy.run(one_step, (block, first + i)))
            return i + 1, self._objective.add(totals, outcome, step + i)

        return repeat(count, one, totals)

    def _first_device(self, per_device: Any) -> Outcome:
        """The outcome is of complete sums, hence the same, on every device."""
        return tf.nest.map_structure(lambda v: self._strategy.experimental_local_results(v)[0], per_device)

    # What follows runs on one device.

    def _bits(self) -> Any:
        """The sum of the bits of all variables, as integers of 32 bits, which wraps around."""
        values = [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in self._program.variables.values()]
        return tf.add_n([tf.reduce_sum(tf.bitcast(value, tf.int32)) for value in values])

    def _train_step(self, block: Block, i: Any) -> Outcome:
        sums = self._sum_over_devices(self._local_sums(block, i, training=True))
        model, optimizer = self._program.model, self._program.optimizer
        outcome = self._objective.outcome(sums, getattr(optimizer, "dynamic_scale", 1.0))
        state = [tf.convert_to_tensor(v) for v in self._objective.state_variables]
        before = [tf.identity(v) for v in self._undone] if self._objective.skips else []
        replicas = self._program.replicas
        triples = zip(self._objective.state_variables, state, sums.mean_state(state, replicas), strict=True)
        moved = [(variable, new) for variable, old, new in triples if new is not old]
        assign(*([each[i] for each in moved] for i in range(2)))
        trained = model.trainable_variables
        tf_update.update(optimizer, sums.mean_gradients(trained, replicas), trained)
        if self._objective.skips:
            after = [tf.convert_to_tensor(v) for v in self._undone]
            assign(self._undone, [tf.where(outcome.healthy, a, b) for a, b in zip(after, before, strict=True)])
        return outcome

    @property
    def _undone(self) -> list[Any]:
        """The variables that a skipped step leaves as they were. Steps count, skipped or not."""
        counting = [id(counter) for counter in counters(self._program.optimizer)]
        return [v for v in self._program.variables.values() if id(v) not in counting]

    def _evaluate_step(self, block: Block, i: Any) -> Outcome:
        sums = self._local_sums(block, i, training=False)
        return self._objective.outcome(self._sum_over_devices([s._replace(state=[]) for s in sums]))

    def _local_sums(self, block: Block, i: Any, training: bool) -> list[Sums]:
        """The nodes of the tree that this device's logical replicas add up to."""
        batch = at(block, i)
        leaf = self._gradient_sums if training else self._forward_sums
        m = self._local_replicas // self._node_size
        nothing = self._objective.no_sums(gradients=training)
        flat = tf.nest.flatten(nothing)

        def node(first: Any) -> list[Any]:
            return sum_of_leaves(lambda r: tf.nest.flatten(leaf(at(batch, first + r))), self._node_size, flat)

        if m == 1:
            return [tf.nest.pack_sequence_as(nothing, node(0))]
        found = [tf.TensorArray(t.dtype, m, element_shape=t.shape) for t in flat]

        def add_node(j: Any, found: list[Any]) -> Any:
            return j + 1, [array.write(j, t) for array, t in zip(found, node(j * self._node_size), strict=True)]

        _, found = tf.while_loop(lambda j, _: j < m, add_node, (tf.constant(0), found), parallel_iterations=1)
        stacked = tf.nest.pack_sequence_as(nothing, [array.stack() for array in found])
        return [tf.nest.map_structure(lambda a, j=j: a[j], stacked) for j in range(m)]

    def _forward_sums(self, batch: Batch) -> Sums:
        trainable, state = self._read_variables()
        return self._objective(trainable, state, batch, training=False)[1]

    def _gradient_sums(self, batch: Batch) -> Sums:
        trainable, state = self._read_variables()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            objective, sums = self._objective(trainable, state, batch, training=True)
            if hasattr(self._program.optimizer, "dynamic_scale"):  # mixed_float16
                objective = self._program.optimizer.scale_loss(objective)
        gradients = tape.gradient(objective, trainable, unconnected_gradients="zero")
        return sums._replace(gradients=[tf.cast(tf.convert_to_tensor(g), tf.float32) for g in gradients])

    def _read_variables(self) -> tuple[list[Any], list[Any]]:
        trainable = [tf.convert_to_tensor(v) for v in self._program.model.trainable_variables]
        return trainable, [tf.convert_to_tensor(v) for v in self._objective.state_variables]

    def _sum_over_devices(self, local: list[Sums]) -> Sums:
        """Sums over all devices, of one vector."""
        if self.devices == 1:
            return local[0]
        vectors = [tf.concat([tf.reshape(t, [-1]) for t in tf.nest.flatten(sums)], 0) for sums in local]
        context = tf.distribute.get_replica_context()
        if self._in_tree_order and self.cluster.size > 1:
            packed = add_over_processes(context, vectors)
        elif self._in_tree_order:
            packed = context.merge_call(add_in_tree_order, (vectors,))
        else:
            packed = context.all_reduce(tf.distribute.ReduceOp.SUM, vectors[0])
        flat = tf.nest.flatten(local[0])
        parts = tf.split(packed, [t.shape.num_elements() for t in flat])
        whole = [tf.reshape(part, t.shape) for part, t in zip(parts, flat, strict=True)]
        return tf.nest.pack_sequence_as(local[0], whole)
