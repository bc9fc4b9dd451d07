"""An optimizer's step on TensorFlow, from gradients that are the whole batch's on every device already."""

from typing import Any

import tensorflow as tf

from trainer.optimizers import averages, each_of
from trainer.strategies.tf_variables import assign


def prepare(optimizer: Any) -> None:
    """Leaves out of an optimizer's apply() what Keras does for several devices, or can't do there."""
    for each in each_of(optimizer):
        each._all_reduce_sum_gradients = list
        each._overwrite_model_variables_with_average_value = lambda variables: None  # update() does


def update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """One step of a prepared optimizer. Runs on one device, as each does.

    Args:
      optimizer: of Keras.
      gradients: one for each variable.
      variables: that are trained.
    """
    averaging = [each for each in each_of(optimizer) if each.ema_overwrite_frequency and averages(each)]
    counts = [tf.identity(each.iterations) for each in averaging]
    optimizer.apply(gradients, variables)
    for each, before in zip(averaging, counts, strict=True):
        count = tf.convert_to_tensor(each.iterations)
        # A step that was left out, because the scaled loss overflowed, is not counted, and nothing is due after it.
        due = (count > before) & (count % each.ema_overwrite_frequency == 0)
        _overwrite(averages(each), due)


def _overwrite(pairs: list[tuple[Any, Any]], due: Any) -> None:
    """Writes moving averages, as constraints allow them, over the variables where that is due."""
    read = [(variable, *map(tf.convert_to_tensor, (variable, average))) for variable, average in pairs]
    new = [tf.where(due, (v.constraint or tf.identity)(average), value) for v, value, average in read]
    assign([variable for variable, _ in pairs], new)
