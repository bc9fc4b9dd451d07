"""resnet: residual networks of 18, 34 or 50 layers (He et al. 2015, arXiv:1512.03385).

In a bottleneck the 3 x 3 convolution has the stride, not the 1 x 1 before it ("v1.5").
"""

from typing import Any

import keras
from keras import layers

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def build(input_shape: tuple[int, ...], classes: int, depth: int = 18, width: int = 64) -> keras.Model:
    """Images (batch, height, width, channels) uint8 -> logits (batch, classes).

    Args:
      input_shape: (height, width, channels). Images of at most 64 pixels keep their size in the stem.
      classes: number of logits.
      depth: 18, 34 or 50.
      width: filters of the first stage; the later three have 2, 4, 8 times as many.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth={depth} is not one of {', '.join(map(str, DEPTHS))}")
    inputs = keras.Input(input_shape, name="image")
    x = layers.Rescaling(1 / 127.5, offset=-1, name="rescaling")(inputs)
    if input_shape[0] > 64:
        x = _convolution(x, width, 7, 2, "stem")
        x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    else:
        x = _convolution(x, width, 3, 1, "stem")
    for stage, blocks in enumerate(DEPTHS[depth]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _block(x, width * 2**stage, stride, depth >= 50, f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    # Logits stay float32 under mixed precision, as the Keras guide advises.
    outputs = layers.Dense(classes, name="logits", dtype="float32")(x)
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def _block(x: Any, filters: int, stride: int, bottleneck: bool, name: str) -> Any:
    """A residual block; it starts as the identity, its last batch-norm's scale being 0."""
    shortcut, out = x, filters * (4 if bottleneck else 1)
    if stride > 1 or x.shape[-1] != out:
        shortcut = _convolution(x, out, 1, stride, f"{name}_shortcut", activation=False)
    if bottleneck:
        x = _convolution(x, filters, 1, 1, f"{name}_0")
        x = _convolution(x, filters, 3, stride, f"{name}_1")
        x = _convolution(x, out, 1, 1, f"{name}_2", activation=False, gamma="zeros")
    else:
        x = _convolution(x, filters, 3, stride, f"{name}_0")
        x = _convolution(x, out, 3, 1, f"{name}_1", activation=False, gamma="zeros")
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _convolution(
    x: Any, filters: int, size: int, stride: int, name: str, activation: bool = True, gamma: str = "ones"
) -> Any:
    x = layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    x = layers.BatchNormalization(gamma_initializer=gamma, momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if activation else x
