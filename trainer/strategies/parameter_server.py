"""parameter_server: variables on servers, steps computed by workers as these come free.

Asynchronous, hence outside the promise of one curve: which gradients are computed from which values is a
matter of timing. Each step's examples are those of any other strategy. The chief reads the data and hands
each step's batch to a free worker; a worker that dies loses nothing, and is taken in again when it is back.
"""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline.pipeline import Pipeline
from trainer.cluster import Cluster, resolve
from trainer.config import Config
from trainer.errors import OK, PEER_LOST, UserError
from trainer.optimizers import each_of
from trainer.processes.connection import Connection, listen
from trainer.program import Program
from trainer.strategies.base import Block
from trainer.strategies.tf_devices import find_gpus
from trainer.strategies.tf_distribute import TFDistribute
from trainer.sums import Outcome, Totals

_JOBS = ("chief", "worker", "ps")
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
    specification = tf.train.ClusterSpec(_addresses(cluster))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(specification, rpc_layer="grpc")
    return ParameterServer(tf.distribute.ParameterServerStrategy(resolver), cluster, presence)


def serve(cluster: Cluster, patience: float) -> int:
    """A worker's or a server's part: computes, or holds, what the chief says, until it says goodbye."""
    role, port = cluster.role, int(cluster.addresses[cluster.index].rpartition(":")[2])
    listen("", port, cluster.source).close()
    if role == "worker":
        find_gpus()
    index = cluster.index - cluster.roles.index(role)
    # Kept in a variable: the server ends with it.
    server = tf.distribute.Server(_addresses(cluster), job_name=role, task_index=index, protocol="grpc")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            connection = Connection(0, socket.create_connection(cluster.meeting, timeout=5.0))
        except OSError:
            time.sleep(0.25)
            continue
        connection.socket.settimeout(None)
        connection.send(process=cluster.index, cluster=list(cluster.addresses))
        while message := connection.receive():
            if "goodbye" in message:
                return OK
        deadline = time.monotonic() + patience  # the chief was lost: it may be started again
    del server
    return PEER_LOST


def _addresses(cluster: Cluster) -> dict[str, list[str]]:
    pairs = list(zip(cluster.addresses, cluster.roles, strict=True))
    return {job: [address for address, role in pairs if role == job] for job in _JOBS}


class Presence:
    """The chief's list of who is there; tells them when the run is over.

    Raises:
      UserError: a server or every worker stays away for longer than `patience` seconds.
    """

    def __init__(self, cluster: Cluster, patience: float) -> None:
        self._there: dict[int, Connection] = {}
        self._listening = listen(cluster.bind_host, cluster.meeting[1], cluster.source)
        threading.Thread(target=self._take_in, daemon=True).start()
        deadline = time.monotonic() + patience
        while missing := [i for i in range(1, cluster.size) if i not in self._there]:
            if time.monotonic() > deadline:
                names = ", ".join(f"{i} ({cluster.roles[i]}, {cluster.addresses[i]})" for i in missing)
                raise UserError(
                    cluster.source,
                    ",".join(cluster.addresses),
                    f"process {names} did not come in {patience:g}s",
                    "look at its log",
                    PEER_LOST,
                )
            time.sleep(0.05)

    def _take_in(self) -> None:
        while True:
            connection = Connection(-1, self._listening.accept()[0])
            connection.socket.settimeout(5.0)
            hello = connection.receive() or {}
            connection.socket.settimeout(None)
            if isinstance(hello.get("process"), int):
                self._there[hello["process"]] = connection

    def close(self) -> None:
        """Says goodbye to all."""
        for connection in self._there.values():
            connection.send(goodbye=True)


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
        self._program.optimizer.iterations.assign(step + count)
        return totals

    def evaluate(self, block: Block, first: int, count: int, totals: Totals) -> Totals:
        for i, outcome in enumerate(self._computed(self._evaluate_on_worker, block, range(first, first + count))):
            totals = self._objective.add(totals, outcome, np.int32(i))
        return totals

    def close(self) -> None:
        _ENDED.append(self)
        self._presence.close()

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
