"""transformer: a decoder-only language model; rotary positions, RMS norm, SwiGLU, grouped heads.

The shape of Llama (Touvron et al. 2023, arXiv:2302.13971), with grouped-query attention (Ainslie et al.
2023, arXiv:2305.13245) and rotary positions (Su et al. 2021, arXiv:2104.09864).
"""

from typing import Any

import keras
from keras import layers, ops

# size: (width, depth, heads, groups, hidden); parameters over 256 bytes are about what the name says.
SIZES = {
    "1M": (128, 5, 4, 2, 352),
    "10M": (320, 8, 8, 4, 896),
    "100M": (768, 14, 12, 4, 2048),
    "1B": (2048, 20, 16, 8, 5632),
    "7B": (4096, 32, 32, 32, 11008),
}

# Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): heads and hidden units
# are shared out over the model axis, so that a block needs two sums over it, after its two last kernels.
LAYOUTS = {
    "megatron": [
        (r".*/(query|key|value)/kernel", [None, "model", None]),
        (r".*/attention/output/kernel", ["model", None, None]),
        (r".*/(gate|up)/kernel", [None, "model"]),
        (r".*/down/kernel", ["model", None]),
        (r".*embedding/embeddings", ["model", None]),
        (r".*logits/kernel", [None, "model"]),
    ],
}


def build(
    input_shape: tuple[int, ...],
    classes: int,
    size: str = "1M",
    width: int = 0,
    depth: int = 0,
    heads: int = 0,
    groups: int = 0,
    hidden: int = 0,
    dropout: float = 0.0,
    remat: bool = False,
) -> keras.Model:
    """Tokens (batch, time) -> logits (batch, time, classes) of the token after each; compiled.

    Args:
      input_shape: (time,).
      classes: number of different tokens.
      size: names the five that follow, each of which overrides it if it is not 0.
      width: of the residual stream.
      depth: number of blocks.
      heads: of attention; they divide width.
      groups: of heads that share keys and values.
      hidden: units of the feed-forward layers.
      dropout: rate, on what each layer adds to the residual stream.
      remat: keep a block's input alone for the backward pass, and compute the rest again.
    """
    given = (width, depth, heads, groups, hidden)
    if size not in SIZES:
        raise ValueError(f"size={size!r} is not one of {', '.join(SIZES)}")
    width, depth, heads, groups, hidden = (a or b for a, b in zip(given, SIZES[size], strict=True))
    tokens = keras.Input(input_shape, dtype="int32", name="tokens")
    x = layers.Embedding(classes, width, embeddings_initializer=_normal(), name="embedding")(tokens)
    for i in range(depth):
        x = Block(width, depth, heads, groups, hidden, dropout, remat, name=f"block_{i}")(x)
    x = layers.RMSNormalization(name="norm")(x)
    x = layers.Dense(classes, use_bias=False, kernel_initializer=_normal(), name="logits")(x)
    # Under mixed precision the loss stays float32, as the Keras guide advises; of many tokens, the product is a large
    # part of all, and accelerators are fast in 16 bits alone.
    x = layers.Activation("linear", dtype="float32", name="float32")(x)
    model = keras.Model(tokens, x, name="transformer")
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[BitsPerToken(), "accuracy"]
    )
    return model


@keras.saving.register_keras_serializable("onecurve")
class Block(layers.Layer):
    """Attention, then a feed-forward layer, each added to the residual stream (batch, time, width)."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        groups: int,
        hidden: int,
        dropout: float,
        remat: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sizes = {
            "width": width,
            "depth": depth,
            "heads": heads,
            "groups": groups,
            "hidden": hidden,
            "dropout": dropout,
            "remat": remat,
        }
        # What is added to the stream starts smaller the more is added (GPT-2's rule).
        last = _normal(0.02 / (2 * depth) ** 0.5)
        self.attention_norm = layers.RMSNormalization(name="attention_norm", dtype=self.dtype_policy)
        self.attention = Attention(width, heads, groups, last, name="attention", dtype=self.dtype_policy)
        self.feed_forward_norm = layers.RMSNormalization(name="feed_forward_norm", dtype=self.dtype_policy)
        dense = {"use_bias": False, "kernel_initializer": _normal(), "dtype": self.dtype_policy}
        self.gate = layers.Dense(hidden, name="gate", **dense)
        self.up = layers.Dense(hidden, name="up", **dense)
        self.down = layers.Dense(width, name="down", **dense | {"kernel_initializer": last})
        self.dropout = layers.Dropout(dropout, name="dropout", dtype=self.dtype_policy)

    def build(self, input_shape: tuple[int, ...]) -> None:
        for norm in (self.attention_norm, self.feed_forward_norm, self.gate, self.up):
            norm.build(input_shape)
        self.attention.build(input_shape)
        self.down.build((*input_shape[:-1], self.sizes["hidden"]))

    def call(self, x: Any, training: bool = False) -> Any:
        def block(x: Any) -> Any:
            x = x + self.dropout(self.attention(self.attention_norm(x)), training=training)
            y = self.feed_forward_norm(x)
            y = self.down(ops.silu(self.gate(y)) * self.up(y))
            return x + self.dropout(y, training=training)

        return keras.remat(block)(x) if self.sizes["remat"] and training else block(x)

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self.sizes


@keras.saving.register_keras_serializable("onecurve")
class Attention(layers.Layer):
    """Causal attention with rotary positions; `groups` of heads share keys and values."""

    def __init__(self, width: int, heads: int, groups: int, last: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads, self.groups = heads, groups
        size = width // heads

        def projection(equation: str, shape: tuple[Any, ...], name: str, initializer: Any) -> layers.Layer:
            return layers.EinsumDense(
                equation, shape, kernel_initializer=initializer, name=name, dtype=self.dtype_policy
            )

        self.query = projection("btd,dhk->bthk", (None, heads, size), "query", _normal())
        self.key = projection("btd,dhk->bthk", (None, groups, size), "key", _normal())
        self.value = projection("btd,dhk->bthk", (None, groups, size), "value", _normal())
        self.out = projection("bthk,hkd->btd", (None, width), "output", last)

    def build(self, input_shape: tuple[int, ...]) -> None:
        for layer in (self.query, self.key, self.value):
            layer.build(input_shape)
        self.out.build(self.query.compute_output_shape(input_shape))

    def call(self, x: Any) -> Any:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key = _rotate(query, key)
        key, value = (ops.repeat(a, self.heads // self.groups, axis=2) for a in (key, value))
        # Keras takes a flash kernel by itself where the backend has one.
        return self.out(ops.dot_product_attention(query, key, value, is_causal=True))


@keras.saving.register_keras_serializable("onecurve")
class BitsPerToken(keras.metrics.MeanMetricWrapper):
    """Mean cross-entropy in bits; on byte-level text, bits per byte."""

    def __init__(self, name: str = "bits_per_token", dtype: Any = None) -> None:
        super().__init__(_bits, name=name, dtype=dtype)
        self._direction = "down"

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype}


def _bits(y: Any, logits: Any) -> Any:
    return ops.sparse_categorical_crossentropy(y, logits, from_logits=True) / 0.6931471805599453


def _normal(stddev: float = 0.02) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=stddev)


def _rotate(*tensors: Any) -> list[Any]:
    """Turns pairs of features by angles that grow with the position: each (batch, time, heads, size) likewise."""
    time, size = tensors[0].shape[1], tensors[0].shape[3]
    frequency = ops.power(10000.0, -ops.arange(0, size, 2, dtype="float32") / size)
    angle = ops.arange(time, dtype="float32")[:, None] * frequency  # (time, size / 2)
    cos, sin = (ops.cast(f(angle)[None, :, None], tensors[0].dtype) for f in (ops.cos, ops.sin))
    halves = [ops.split(x, 2, axis=-1) for x in tensors]
    return [ops.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1) for a, b in halves]
