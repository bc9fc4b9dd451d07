"""A model with counters of integers: one that float32 can't hold, one that wraps around, one that counts down."""

import keras
from keras import ops

STARTS = {"large": ("int32", 2**25 + 1), "wraps": ("uint8", 250), "down": ("int32", 0)}


class Counter(keras.layers.Layer):
    def build(self, shape):
        for name, (dtype, value) in STARTS.items():
            start = keras.initializers.Constant(value)
            setattr(self, name, self.add_weight((), start, dtype, trainable=False, name=name))

    def call(self, x, training=False):
        if training:
            self.large.assign(self.large + 1)
            self.wraps.assign(self.wraps + ops.cast(1, "uint8"))
            self.down.assign(self.down - 3)
        return x


def build(input_shape, classes):
    layers = [keras.Input(input_shape), Counter(), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential(layers, name="counting")
