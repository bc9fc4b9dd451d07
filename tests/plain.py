"""Models that plain Keras trains, too, step by step, from the variables and on the batches of a run.

python -m tests.plain CASE RUN: prints, as JSON, the metrics of each step and of an evaluation.
"""

import json
import pathlib
import sys

import keras
import numpy as np

from input_pipeline import digits
from input_pipeline.order import order

STEPS, BATCH = 6, 24
_SEED = 0


def load():
    """Digits, and whether they are odd."""
    found = digits.load()

    def two(source):
        x, y = source.read(np.arange(300))
        return x[..., 0].astype(np.int32) // 16, {"digit": y, "odd": np.eye(2, dtype=np.float32)[y % 2]}

    return {"train": two(found.train), "evaluation": two(found.evaluation)}


def build(input_shape, case):
    inputs = keras.Input(input_shape, dtype="int32")
    x = {"convolutions": _convolutions, "recurrent": _recurrent, "attention": _attention}[case](inputs)
    outputs = {"digit": keras.layers.Dense(10, name="digit")(x), "odd": keras.layers.Dense(2, "softmax", name="odd")(x)}
    model = keras.Model(inputs, outputs)
    model.compile(
        _optimizer(case),
        loss={
            "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "odd": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        },
        loss_weights={"digit": 0.3, "odd": 2.0},
        metrics={
            "digit": [keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
            "odd": [keras.metrics.AUC(50, name="auc"), "accuracy"],
        },
    )
    return model


def _convolutions(inputs):
    l2 = keras.regularizers.L2(0.01)
    x = keras.layers.Reshape((8, 8, 1))(keras.layers.Rescaling(1 / 16)(inputs))
    x = keras.layers.Conv2D(6, 3, activation="relu", kernel_regularizer=l2)(x)
    x = keras.layers.BatchNormalization(momentum=0.8)(x)
    x = keras.layers.Flatten()(keras.layers.DepthwiseConv2D(3)(x))
    return keras.layers.Dense(12, "tanh", bias_regularizer=l2, kernel_constraint=keras.constraints.MaxNorm(0.5))(x)


def _recurrent(inputs):
    x = keras.layers.Embedding(17, 8, mask_zero=True, embeddings_regularizer="l1")(keras.layers.Flatten()(inputs))
    return keras.layers.Bidirectional(keras.layers.LSTM(6))(x)


def _attention(inputs):
    x = keras.layers.Dense(16)(keras.layers.Rescaling(1 / 16)(inputs))
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 8)(x, x))
    return keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(16, "gelu", kernel_constraint="non_neg")(x))


def _optimizer(case):
    schedules = keras.optimizers.schedules
    if case == "convolutions":
        rate = schedules.PiecewiseConstantDecay([2, 4], [0.05, 0.01, 0.002])
        return keras.optimizers.Nadam(rate, clipnorm=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)
    if case == "recurrent":
        rate = schedules.CosineDecay(0.01, 4, warmup_target=0.05, warmup_steps=2)
        return keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=0.2, amsgrad=True)
    rate = schedules.ExponentialDecay(0.1, 3, 0.5)
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, clipvalue=0.02, weight_decay=0.1)


def main(case, run):
    sources = load()
    x, y = sources["train"]
    model = build(x.shape[1:], case)
    model.load_weights(pathlib.Path(run, "checkpoints", f"{0:08}", "model.weights.h5"))
    metrics = []
    for step in range(STEPS):
        ids = order(_SEED, np.arange(step * BATCH, (step + 1) * BATCH), len(x))
        model.reset_metrics()
        metrics.append(model.train_on_batch(x[ids], {name: each[ids] for name, each in y.items()}, return_dict=True))
    model.optimizer.finalize_variable_values(model.trainable_variables)  # as fit() does
    metrics.append(model.evaluate(*sources["evaluation"], batch_size=100, return_dict=True, verbose=0))
    print(json.dumps([{name: float(value) for name, value in each.items()} for each in metrics]))


if __name__ == "__main__":
    main(*sys.argv[1:])
