"""dense: Flatten, 200 relu units without bias, dropout 0.4, softmax; it brings its own loss and metrics."""

import keras
from keras import layers


def build(input_shape: tuple[int, ...], classes: int, units: int = 200, dropout: float = 0.4) -> keras.Model:
    """Images (batch, *input_shape) uint8 -> probabilities (batch, classes); compiled."""
    model = keras.Sequential(
        [
            keras.Input(input_shape, name="image"),
            layers.Rescaling(1 / 255, name="rescaling"),
            layers.Flatten(name="flatten"),
            layers.Dense(units, activation="relu", use_bias=False, name="hidden"),
            layers.Dropout(dropout, name="dropout"),
            layers.Dense(classes, activation="softmax", name="probabilities", dtype="float32"),
        ],
        name="dense",
    )
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
