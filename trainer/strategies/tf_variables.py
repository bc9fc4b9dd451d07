"""Variables under tf.distribute: a copy on each device, read on the host as one."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def on_host(variable: keras.Variable) -> np.ndarray:
    """Its value, on CPUs without a copy. By way of one dim: of none, numpy takes no bfloat16 from TensorFlow."""
    return np.asarray(tf.reshape(variable.value, [-1])).reshape(variable.shape)


def let_python_read_numbers() -> None:
    """Has float() and int() of a variable work where it is mirrored, as in callbacks: Keras asks what has neither."""
    for kind in (float, int):
        setattr(keras.Variable, f"__{kind.__name__}__", lambda variable, kind=kind: kind(on_host(variable)))


def assign(variables: list[Any], values: list[Any]) -> None:
    """Sets each device's own copy; all devices pass the same values, so nothing is reduced."""

    def update(strategy: Any, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda v, x: v.assign(x), (value,), group=False)

    if variables:
        tf.distribute.get_replica_context().merge_call(update, (values,))
