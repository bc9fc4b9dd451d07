"""multi_worker_mirrored: several processes of TensorFlow, each with its GPUs or one CPU."""

import json
import os

import tensorflow as tf

from trainer.cluster import Cluster
from trainer.config import Config
from trainer.connection import listen
from trainer.errors import UserError
from trainer.strategies.tf_distribute import TFDistribute, hold_rounding_fixed


def create(config: Config, cluster: Cluster) -> TFDistribute:
    """MultiWorkerMirroredStrategy over the cluster's processes, each with its GPUs, or one CPU."""
    if config.exact:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    exact = config.exact or not gpus
    if exact:
        hold_rounding_fixed()
    port = int(cluster.addresses[cluster.index].rpartition(":")[2])
    listen("", port, cluster.source).close()  # TensorFlow would only say that it can't start its server
    workers = {"cluster": {"worker": list(cluster.addresses)}, "task": {"type": "worker", "index": cluster.index}}
    os.environ["TF_CONFIG"] = json.dumps(workers)  # one form, wherever it came from
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    devices = strategy.num_replicas_in_sync
    if config.devices and config.devices != devices:
        raise UserError(
            "devices",
            config.devices,
            f"contradicts the cluster: {cluster.size} processes have {devices}",
            "drop --devices; processes on CPUs have one each",
        )
    kind = "GPUs" if gpus else "CPUs"
    description = f"{devices} {kind} of {cluster.size} processes, MultiWorkerMirroredStrategy"
    return TFDistribute(strategy, description, exact, cluster)
