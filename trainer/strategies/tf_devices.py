"""The devices of a TensorFlow run."""

from typing import Any

import tensorflow as tf

from trainer.processes import gpus


def find_gpus() -> list[Any]:
    """The GPUs that TensorFlow finds; says so where it finds none of those that are there."""
    found = list(tf.config.list_physical_devices("GPU"))
    if not found:
        gpus.tell_if_idle("tensorflow")
    return found
