"""parameter_server: variables on servers, steps computed by workers as these come free.

Asynchronous, hence outside the promise of one curve: which gradients are computed from which values is a
matter of timing. Each step's examples are those of any other strategy. The chief reads the data and hands
each step's batch to a free worker; a worker that dies loses nothing, and is taken in again when it is back.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline.pipeline import Pipeline
from trainer.cluster import Cluster, resolve
from trainer.config import Config
from trainer.errors import UserError
from trainer.optimizers import counters, each_of
from trainer.program import Program
from trainer.strategies.base import Block
from trainer.strategies.presence import Presence, addresses
from trainer.strategies.tf_distribute import TFDistribute
from trainer.sums import Outcome, Totals

_ENDED: list[object] = []  # held to the end, or TensorFlow would ask servers that are gone to forget its functions


def create(config: Config, cluster: Cluster) -> "ParameterServer":
    """The chief's part, once all workers and servers are there.

    Args:
      config: the flags.
      cluster: unused: to the rest of the trainer, the chief is alone.
    """
    cluster = resolve(config.cluster)
    if config.exact:
        raise UserError("exact", True, "can't be held by asynchronous steps", "drop --exact, or use another --strategy")
    presence = Presence(cluster, config.patience)
    specification = tf.train.ClusterSpec(addresses(cluster))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(specification, rpc_layer="grpc")
    return ParameterServer(tf.distribute.ParameterServerStrategy(resolver), cluster, presence)


class ParameterServer(TFDistribute):
    """Steps handed to workers by a ClusterCoordinator.

    Args:
      strategy: places variables on the servers in turn.
      cluster: chief, workers, servers.
      presence: of the workers and servers.
    """

    can_skip = False

    def __init__(self, strategy: "tf.distribute.ParameterServerStrategy", cluster: Cluster, presence: Presence) -> None:
        workers, servers = cluster.roles.count("worker"), cluster.roles.count("ps")
        description = f"{workers} workers and {servers} servers, asynchronous: the curve depends on their timing"
        super().__init__(strategy, description, exact=False)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._presence = presence
        self._open: list[tf.data.Dataset] = []  # servers know their functions: they are held as long as we are

    def compile(self, program: Program) -> None:
        super().compile(program)
        for optimizer in each_of(program.optimizer):
            _update_one_at_a_time(optimizer)
        self._train_on_worker = self._on_worker(self._train_step)
        self._evaluate_on_worker = self._on_worker(self._evaluate_step)

    def feed(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        dataset = pipeline.dataset(first_block)
        self._open.append(dataset)
        yield from itertools.islice(dataset, pipeline.blocks_from(first_block))
        self._open.remove(dataset)

    def predict(self, x: Any) -> None:
        """None: the variables lie on the servers."""

    def flops(self, spec: Any) -> float:
        return 0.0  # workers come and go: no peak is theirs

    def checksums(self) -> list[int]:
        return []  # each variable is on one server

    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        for i, outcome in enumerate(self._computed(self._train_on_worker, block, range(first, first + count))):
            totals = self._objective.add(totals, outcome, np.int32(step + i))
        # Workers that read and add at once lose counts; what is done is known here.
        for counter in counters(self._program.optimizer):
            counter.assign(step + count)
        return totals

    def evaluate(self, block: Block, first: int, count: int, totals: Totals) -> Totals:
        for i, outcome in enumerate(self._computed(self._evaluate_on_worker, block, range(first, first + count))):
            totals = self._objective.add(totals, outcome, np.int32(i))
        return totals

    def close(self, code: int) -> None:
        _ENDED.append(self)
        self._presence.close(code)

    def _computed(self, function: Any, block: Block, indices: range) -> list[Outcome]:
        """What workers make of steps of a block, all of them done."""
        parts = [tf.nest.map_structure(lambda a, i=i: a[i : i + 1], block) for i in indices]
        results = [self._coordinator.schedule(function, args=(part,)) for part in parts]
        self._coordinator.join()
        return [result.fetch() for result in results]

    def _on_worker(self, step: Any) -> Any:
        """A function of a block of one step that a worker runs."""
        return tf.function(lambda block: self._first_device(self._strategy.run(step, (block, 0))), autograph=False)


def _update_one_at_a_time(optimizer: Any) -> None:
    """Has a variable and its slots updated by one worker at a time.

    Between two workers, Adam's first moment can have a gradient that its second has not: where that was zero so far,
    the step is some 100,000 times too long. A lock is taken when the gradient has come, and on the variable's server:
    a worker that dies holds none.
    """
    sections = []
    for variable in optimizer._trainable_variables:
        with tf.device(variable.value.device):
            sections.append(tf.CriticalSection(shared_name=f"{optimizer.name}/{variable.path}"))
    update = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        def critical() -> Any:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            update(gradient, variable, learning_rate)
            with tf.control_dependencies(graph.get_operations()[before:]):
                return tf.constant(0)  # which the lock is given back for

        section = sections[optimizer._get_variable_index(variable)]
        section.execute(critical, exclusive_resource_access=False)  # all read the step's number

    optimizer.update_step = update_step
