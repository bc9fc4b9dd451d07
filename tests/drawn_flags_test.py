"""Flags drawn at random: a run that stops, and goes on on other devices, ends as one that does neither."""

import random

import keras
import pytest

from tests.forks import trainer
from tests.running import lines, summary

DRAWN = {
    "model": ["mlp(units=32)", "dense(units=16)", "tests.drawn_flags_test:recurrent"],
    "dataset": ["digits", "synthetic(examples=333)", "mixture(parts={'digits': 3, 'synthetic(examples=50)': 1})"],
    "optimizer": [
        *("adam", "adam(use_ema=True, ema_overwrite_frequency=7)", "adam(amsgrad=True, clipvalue=0.5)"),
        *("adamw(global_clipnorm=1.0)", "adadelta", "adamax", "adagrad", "lamb", "lion", "muon", "nadam"),
        *("rmsprop(momentum=0.5, centered=True)", "sgd(momentum=0.9, nesterov=True)"),
    ],
    "schedule": ["constant", "constant(warmup_steps=20)"],
    "precision": ["float32", "mixed_bfloat16", "mixed_float16"],
    "on_nan": ["stop", "skip", "rollback(spike=50)"],
    "validation_fraction": ["0", "0.2"],
    "cache": ["none", "memory"],
    "log_every": ["1", "7", "100", "1epoch", "never"],
    "evaluate_every": ["13", "1epoch", "never"],
    "save_every": ["5", "0.5epoch", "1epoch", "never"],
    "keep": ["1", "2"],
    "prefetch": ["1", "5"],
    "seed": ["0", "1"],
}
CALLBACKS = [
    *("ReduceLROnPlateau(monitor='loss', patience=1)", "ReduceLROnPlateau(monitor='accuracy', patience=1, factor=0.5)"),
    *("EarlyStopping(monitor='loss', patience=9)", "EarlyStopping(monitor='accuracy', patience=1)"),
]


def recurrent(input_shape, classes):
    layers = keras.layers
    rows = [keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Reshape(input_shape[:2])]
    hidden = [layers.GRU(12, dropout=0.1), layers.BatchNormalization(), layers.GaussianNoise(0.1)]
    return keras.Sequential([*rows, *hidden, layers.Dense(classes)])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("strategy", ["device_mesh", "mirrored"])
def test_a_run_of_any_flags_goes_on_where_it_stood(strategy, seed, tmp_path):
    draw = random.Random(f"{strategy} {seed}")
    given = {flag: draw.choice(values) for flag, values in DRAWN.items()}
    replicas, steps = draw.choice([2, 3, 4, 6]), draw.choice([30, 60, 90])
    flags = [*(f"--{flag}={value}" for flag, value in given.items()), f"--replicas={replicas}"]
    flags += [f"--global_batch={replicas * draw.choice([3, 8, 16])}"]
    if draw.random() < 0.5 and given["schedule"] == "constant":
        flags += [f"--callbacks={draw.choice(CALLBACKS)}"]

    def run(name: str, end: int) -> None:
        devices = draw.choice([n for n in range(1, replicas + 1) if replicas % n == 0])
        trainer(
            *flags,
            f"--strategy={strategy}",
            f"--devices={devices}",
            f"--steps={end}",
            f"--run_dir={name}",
            cwd=tmp_path,
        )

    run("whole", steps)
    for end in sorted(draw.sample(range(1, steps), 2)):
        run("parts", end)
    run("parts", steps)
    ends = [summary(tmp_path / name) for name in ("whole", "parts")]
    for fact in ("weights_sha256", "step"):
        assert ends[0][fact] == ends[1][fact], flags
    told = [[line for line in lines(tmp_path / name) if "learning_rate" in line] for name in ("whole", "parts")]
    rates = [of_run[-1]["learning_rate"] for of_run in told]
    assert rates[0] == rates[1], flags
