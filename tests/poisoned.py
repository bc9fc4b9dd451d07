"""The digits, some of which are not a number; and a callback that ruins the weights once."""

import keras
import numpy as np

from input_pipeline import digits
from input_pipeline.dataset import Dataset
from input_pipeline.source import Arrays


def load(examples=(700,)) -> Dataset:
    """Digits in float32, with NaN in the given training examples."""
    data = digits.load()
    images, labels = data.train.arrays
    images = images.astype(np.float32)
    images[list(examples)] = np.nan
    test = data.evaluation.arrays
    return Dataset(Arrays(images, labels), Arrays(test[0].astype(np.float32), test[1]), classes=10)


class Ruin(keras.callbacks.Callback):
    """Makes the weights a hundred times what they are, at a logged step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self._step:
            self.model.set_weights([w * 100 for w in self.model.get_weights()])


class Decaying(keras.callbacks.Callback):
    """Sets the learning rate where an epoch begins: to 1e-3, a half of it, a third."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 1e-3 / (1 + epoch)
