"""one_device and mirrored on TensorFlow: the devices of one process."""

import tensorflow as tf

from trainer.cluster import Cluster
from trainer.config import Config
from trainer.strategies.base import threads_of_cpu
from trainer.strategies.tf_devices import find_gpus
from trainer.strategies.tf_distribute import TFDistribute
from trainer.strategies.tf_sums import hold_rounding_fixed


def create(config: Config, cluster: Cluster) -> TFDistribute:
    """OneDeviceStrategy or MirroredStrategy on real devices, or on virtual CPUs where those are too few."""
    found = find_gpus()
    wanted = 1 if config.strategy == "one_device" else config.devices or max(1, len(found))
    if len(found) >= wanted:
        names = [f"GPU:{i}" for i in range(wanted)]
        description = f"{wanted} of {len(found)} GPUs"
    else:
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * wanted)
        names = [f"CPU:{i}" for i in range(wanted)]
        description = "1 CPU" if wanted == 1 else f"{wanted} virtual CPU devices (this machine has {len(found)} GPUs)"
    # Virtual devices are there to show that the devices don't matter, and lose no fast interconnect.
    replicas, on_cpu = max(config.replicas, wanted), "CPU" in names[0]
    exact = config.exact or (on_cpu and replicas > 1)
    if exact:
        hold_rounding_fixed(threads_of_cpu(config, replicas) if on_cpu else 0)
    if config.strategy == "one_device":
        strategy = tf.distribute.OneDeviceStrategy(names[0])
    else:
        strategy = tf.distribute.MirroredStrategy(names)
    return TFDistribute(strategy, f"{description}, {type(strategy).__name__}", exact)
