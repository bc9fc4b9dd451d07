"""multi_worker_mirrored: several processes of TensorFlow, each with its GPUs or one CPU."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops

from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.processes.connection import listen
from trainer.strategies.base import threads_of_cpu
from trainer.strategies.tf_devices import find_gpus
from trainer.strategies.tf_distribute import TFDistribute
from trainer.strategies.tf_sums import hold_rounding_fixed


def create(config: Config, cluster: Cluster) -> TFDistribute:
    """MultiWorkerMirroredStrategy over the cluster's processes, each with its GPUs, or one CPU."""
    found = find_gpus()
    exact = config.exact or not found
    if exact:
        hold_rounding_fixed(0 if found else threads_of_cpu(config, max(config.replicas, cluster.size)))
    port = int(cluster.addresses[cluster.index].rpartition(":")[2])
    listen("", port, cluster.source).close()  # TensorFlow would only say that it can't start its server
    workers = {"cluster": {"worker": list(cluster.addresses)}, "task": {"type": "worker", "index": cluster.index}}
    os.environ["TF_CONFIG"] = json.dumps(workers)  # one form, wherever it came from
    _broadcast_all_types(cluster)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    devices = strategy.num_replicas_in_sync
    if config.devices and config.devices != devices:
        raise UserError(
            "devices",
            config.devices,
            f"contradicts the cluster: {cluster.size} processes have {devices}",
            "drop --devices; processes on CPUs have one each",
        )
    kind = "GPUs" if found else "CPUs"
    description = f"{devices} {kind} of {cluster.size} processes, MultiWorkerMirroredStrategy"
    return TFDistribute(strategy, description, exact, cluster)


def _broadcast_all_types(cluster: Cluster) -> None:
    """Has TensorFlow give initial values of any type from the chief to the others: some, like bfloat16, it can't send.

    They go as a wider type that holds them.
    """
    send, receive = collective_ops.broadcast_send, collective_ops.broadcast_recv

    def wider(dtype: Any) -> Any:
        known = (tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
        return dtype if dtype in known else tf.int64 if dtype.is_integer else tf.float32

    def send_any(value: tf.Tensor, shape: Any, dtype: Any, *group: Any) -> tf.Tensor:
        with _explained(shape, dtype, cluster):
            return tf.cast(send(tf.cast(value, wider(dtype)), shape, wider(dtype), *group), dtype)

    def receive_any(shape: Any, dtype: Any, *group: Any) -> tf.Tensor:
        with _explained(shape, dtype, cluster):
            return tf.cast(receive(shape, wider(dtype), *group), dtype)

    collective_ops.broadcast_send, collective_ops.broadcast_recv = send_any, receive_any


@contextlib.contextmanager
def _explained(shape: Any, dtype: Any, cluster: Cluster) -> Iterator[None]:
    """Raises UserError where processes build different variables: they are compared when all are built, too late."""
    try:
        yield
    except tf.errors.OpError as error:
        if not re.search("expected (shape|type) ", error.message):
            raise
        raise UserError(
            "cluster",
            ",".join(cluster.addresses),
            f"the processes build different variables: the next of process {cluster.index} is {dtype.name} {shape}",
            "start all processes with the same flags, code, data and packages",
        ) from error
