"""tpu: TPUStrategy, for TensorFlow on a TPU. Written against its documentation; no TPU has run it yet."""

import os
import pathlib

import tensorflow as tf

from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.strategies.tf_distribute import TFDistribute


def create(config: Config, cluster: Cluster) -> TFDistribute:
    """All cores of the TPU that TPU_NAME names, or of this machine's.

    Raises:
      UserError: there is no TPU, or it can't be reached.
    """
    name = os.environ.get("TPU_NAME", "")
    try:
        # Without this look, TensorFlow would ask a metadata server for minutes.
        if not name and not any(pathlib.Path("/dev").glob("accel*")) and not pathlib.Path("/dev/vfio").exists():
            raise ValueError("this machine has no TPU, and TPU_NAME names none")
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(name or "local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise UserError(
            "strategy",
            config.strategy,
            f"{error}",
            "set TPU_NAME; or use --strategy=device_mesh, which runs on TPUs by JAX and needs no tf.distribute",
        ) from None
    strategy = tf.distribute.TPUStrategy(resolver)
    return TFDistribute(strategy, f"{strategy.num_replicas_in_sync} TPU cores, TPUStrategy", exact=False)
