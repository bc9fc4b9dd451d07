"""vit: a vision transformer over patches (Dosovitskiy et al. 2020, arXiv:2010.11929), with a mean over them."""

from typing import Any

import keras
from keras import layers, ops

# Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), as in transformer.py.
LAYOUTS = {
    "megatron": [
        (r".*/(query|key|value)/kernel", [None, "model", None]),
        (r".*/(query|key|value)/bias", ["model", None]),
        (r".*/attention_output/kernel", ["model", None, None]),
        (r"feed_forward_in_\d+/kernel", [None, "model"]),
        (r"feed_forward_in_\d+/bias", ["model"]),
        (r"feed_forward_out_\d+/kernel", ["model", None]),
    ],
}


def build(
    input_shape: tuple[int, ...],
    classes: int,
    patch: int = 4,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.1,
) -> keras.Model:
    """Images (batch, height, width, channels) uint8 -> logits (batch, classes).

    Args:
      input_shape: (height, width, channels); patch divides height and width.
      classes: number of logits.
      patch: pixels of a patch's side.
      width: of the residual stream; the feed-forward layers have 4 times as many units.
      depth: number of blocks.
      heads: of attention; they divide width.
      dropout: rate.
    """
    inputs = keras.Input(input_shape, name="image")
    x = layers.Rescaling(1 / 127.5, offset=-1, name="rescaling")(inputs)
    x = layers.Conv2D(width, patch, patch, name="patches")(x)
    x = layers.Reshape((-1, width), name="sequence")(x)
    x = Positions(name="positions")(x)
    for i in range(depth):
        y = layers.LayerNormalization(epsilon=1e-6, name=f"attention_norm_{i}")(x)
        y = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"attention_{i}")(y, y)
        x = layers.Add(name=f"attention_add_{i}")([x, layers.Dropout(dropout, name=f"attention_dropout_{i}")(y)])
        y = layers.LayerNormalization(epsilon=1e-6, name=f"feed_forward_norm_{i}")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"feed_forward_in_{i}")(y)
        y = layers.Dense(width, name=f"feed_forward_out_{i}")(y)
        x = layers.Add(name=f"feed_forward_add_{i}")([x, layers.Dropout(dropout, name=f"feed_forward_dropout_{i}")(y)])
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    # Logits stay float32 under mixed precision, as the Keras guide advises.
    outputs = layers.Dense(classes, name="logits", dtype="float32")(x)
    return keras.Model(inputs, outputs, name="vit")


@keras.saving.register_keras_serializable("onecurve")
class Positions(layers.Layer):
    """Adds a learnt vector for each place of a sequence (batch, places, width)."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.embeddings = self.add_weight(
            shape=input_shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.02), name="embeddings"
        )

    def call(self, x: Any) -> Any:
        return x + ops.cast(self.embeddings, x.dtype)
