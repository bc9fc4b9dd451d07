"""mlp: the multilayer perceptron of the Keras guides, 784-256-256-10 on 28 x 28 images."""

import keras
from keras import layers


def build(
    input_shape: tuple[int, ...], classes: int, units: int = 256, depth: int = 2, dropout: float = 0.0
) -> keras.Model:
    """Images (batch, *input_shape) uint8 -> logits (batch, classes)."""
    hidden = []
    for i in range(depth):
        hidden.append(layers.Dense(units, activation="relu", name=f"dense_{i}"))
        if dropout:
            hidden.append(layers.Dropout(dropout, name=f"dropout_{i}"))
    return keras.Sequential(
        [
            keras.Input(input_shape, name="image"),
            layers.Rescaling(1 / 255, name="rescaling"),
            layers.Flatten(name="flatten"),
            *hidden,
            # Logits stay float32 under mixed precision, as the Keras guide advises.
            layers.Dense(classes, name="logits", dtype="float32"),
        ],
        name="mlp",
    )
