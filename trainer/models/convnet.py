"""convnet: the convolutional network of Keras's distributed-training-with-JAX guide."""

import keras
from keras import layers


def build(
    input_shape: tuple[int, ...],
    classes: int,
    filters: tuple[int, ...] = (12, 24, 32),
    units: int = 256,
    dropout: float = 0.5,
) -> keras.Model:
    """Images (batch, height, width, channels) uint8 -> logits (batch, classes)."""
    inputs = keras.Input(input_shape, name="image")
    x = layers.Rescaling(1 / 255, name="rescaling")(inputs)
    for i, n in enumerate(filters):
        x = layers.Conv2D(
            n,
            kernel_size=6 if i else 3,
            strides=2 if i else 1,
            padding="same",
            use_bias=False,
            name=f"conv_{i}",
        )(x)
        x = layers.BatchNormalization(scale=False, center=True, name=f"norm_{i}")(x)
        x = layers.ReLU(name=f"relu_{i}")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(units, activation="relu", name="hidden")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    # Logits stay float32 under mixed precision, as the Keras guide advises.
    outputs = layers.Dense(classes, name="logits", dtype="float32")(x)
    return keras.Model(inputs, outputs, name="convnet")
