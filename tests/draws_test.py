"""Initial weights, and what layers draw in a step: the same numbers on every backend."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.forks import trainer
from tests.running import REPOSITORY, curve, deviation, environment

DRAWN = """
import json, hashlib, keras, numpy as np
from trainer.objective import draws

shape = (1100, 1000)  # more than a generator draws
of = keras.initializers
with draws.on_host():
    normal = of.RandomNormal(1.0, 0.5, seed=1)(shape)
    truncated = of.TruncatedNormal(1.0, 0.5, seed=1)(shape)
    uniform = of.RandomUniform(-3.0, 1.0, seed=1)(shape)
    halves = of.GlorotUniform(seed=2**31 + 7)(shape, "bfloat16")
    doubles = of.HeNormal(seed=-1)(shape, "float64")
    going_on = of.RandomNormal(seed=keras.random.SeedGenerator(3))
    first, second = going_on((4,)), going_on((4,))
    rotation, wide = of.Orthogonal(seed=4)((64, 32)), of.Orthogonal(2.0, seed=4)((3, 4, 32), "bfloat16")
    one = of.RandomNormal(seed=1)(())
    zeros, ones = of.Zeros()((2, 3), "bfloat16"), of.Ones()([4])
    own = [draw((50, 2), seed=5) for draw in (keras.random.normal, keras.random.uniform, keras.random.truncated_normal)]
    own.append(keras.random.randint((50, 2), 3, 9, seed=keras.random.SeedGenerator(6)))
    noisy = keras.layers.GaussianNoise(1.0, seed=7)(keras.KerasTensor((3, 4)), training=True)  # is traced as ever
    ones += 1  # it is the caller's, as a backend's array would be
assert (zeros == 0).all() and zeros.shape == (2, 3) and zeros.dtype.name == "bfloat16" and ones.tolist() == [2] * 4
assert all(keras.ops.is_tensor(values) for values in own) and noisy.shape == (3, 4)
own = [keras.ops.convert_to_numpy(values) for values in own]
assert set(own[3].flat) == {*range(3, 9)} and own[3].dtype == "int32"
found = [normal, truncated, uniform, halves, doubles, first, second, one, rotation, wide, *own]
assert all(isinstance(values, np.ndarray) for values in found)
assert [v.dtype.name for v in found[2:5]] == ["float32", "bfloat16", "float64"], [v.dtype for v in found]
assert abs(normal.mean() - 1) < 3e-3 and abs(normal.std() - 0.5) < 3e-3 and normal.max() > 2.5
assert 1.999 < truncated.max() <= 2 and 0 <= truncated.min() < 1e-3 and abs(truncated.std() - 0.8796 / 2) < 3e-3
assert -3 <= uniform.min() < -2.99 and 0.99 < uniform.max() <= 1 and abs(uniform.mean() + 1) < 5e-3
assert abs(doubles.std() - (2 / 1100) ** 0.5) < 3e-4
assert len(np.unique(normal[:, 0])) == len(normal) and (first != second).all()
assert abs(rotation.T @ rotation - np.eye(32)).max() < 1e-6
rows = wide.reshape(12, 32).astype("float32")
assert wide.dtype.name == "bfloat16" and abs(rows @ rows.T - 4 * np.eye(12)).max() < 0.05
assert not isinstance(of.RandomNormal(seed=1)((2,)), np.ndarray)  # elsewhere, Keras is as it was
print(json.dumps([hashlib.sha256(values.tobytes()).hexdigest() for values in found]))
"""


def test_what_is_drawn():
    found = []
    for backend in ("tensorflow", "jax"):
        env = environment(KERAS_BACKEND=backend)
        command = [sys.executable, "-c", DRAWN]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "model",
    ["convnet", *(pytest.param(m, marks=pytest.mark.long) for m in ("mlp", "resnet(width=4)", "vit"))],
)
def test_one_seed_gives_one_initial_state(model, tmp_path):
    saved = []
    for backend in ("tensorflow", "jax"):
        run = tmp_path / backend
        trainer(f"--backend={backend}", f"--model={model}", "--steps=1", "--evaluate_every=never", f"--run_dir={run}")
        saved.append(json.loads((run / "checkpoints" / "00000000" / "manifest.json").read_text())["variables"])
    assert saved[0] == saved[1]


IN_A_STEP = """
import json, hashlib, sys, keras, numpy as np
from keras import ops, random
from trainer.objective.randomness import drawn_from
from trainer.strategies import philox

def seed(): return 2**31 + 7
def drawn(draw, within=1e-6, apart=0):
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf
        values = [draw(), tf.function(draw, jit_compile=True)(), tf.function(draw)()]
    else:
        import jax
        values = [jax.jit(draw)()]
    first, *others = [ops.convert_to_numpy(v) for v in values]
    assert all((~np.isclose(first, x, rtol=within, atol=2 * within)).sum() <= apart * first.size for x in others)
    return first

def gradient(at, draw):
    # Of the mean of what is drawn, by one parameter.
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf
        with tf.GradientTape() as tape:
            tape.watch(x := tf.constant(at))
            mean = ops.mean(draw(x))
        return float(tape.gradient(mean, x))
    import jax
    return float(jax.jit(jax.grad(lambda x: ops.mean(draw(x))))(at))

COUNTS = np.array([[1], [10], [40000], [12], [7]])
CHANCES = np.array([[0.5], [0.01], [0.3], [0.0], [1.0]])
logits = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]], np.float32))
ones = np.ones((200, 30, 50), np.float32)
generator = philox.GENERATORS[keras.config.backend()]
with drawn_from(generator):
    # The generator's authors' known answer for a key and a counter of zeros.
    zeros = ops.cast(ops.zeros((2,), "int32"), "uint32")
    words = [int(word) for word in ops.convert_to_numpy(generator.bits((4,), zeros))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], words
    equal = {
        "uniform": drawn(lambda: random.uniform((1000, 3, 100), -1.0, 3.0, seed=seed())),
        "bfloat16": ops.cast(random.uniform((5001,), dtype="bfloat16", seed=seed()), "float32"),
        "float16": random.uniform((5000,), dtype="float16", seed=seed()),
        "randint": drawn(lambda: random.randint((100001,), -3, 4, seed=seed())),
        "categorical": drawn(lambda: random.categorical(logits, 20000, seed=seed())),
        "dropout": drawn(lambda: random.dropout(ones, 0.3, seed=seed())),
        "a mask for all rows": drawn(lambda: random.dropout(ones, 0.5, (None, 1, None), seed())),
        "shuffle": drawn(lambda: random.shuffle(np.arange(3000).reshape(3, 1000), 1, seed())),
        "one": drawn(lambda: random.uniform((), seed=1)),
        "none": drawn(lambda: random.uniform((3, 0), seed=1)),
    }
    close = {
        "normal": drawn(lambda: random.normal((1000, 1001), 1.0, 2.0, seed=seed())),
        "truncated": drawn(lambda: random.truncated_normal((1000, 1001), 1.0, 2.0, seed=seed())),
        # Logarithms are rounded otherwise in a compiled program; of a number's tries now and then another one is kept.
        "gamma": drawn(lambda: random.gamma((2, 20000), [[0.3], [7.0]], seed=seed()), 1e-5, 1e-4),
        "beta": drawn(lambda: random.beta((2, 20000), 0.2, [[0.2], [3.0]], seed=seed()), 1e-5, 1e-4),
        "binomial": drawn(lambda: random.binomial((5, 4000), COUNTS, CHANCES, seed=seed()), 1e-5, 1e-3),
    }
    to_alpha = [gradient(alpha, lambda x: random.gamma((8000,), x, seed=seed())) for alpha in (0.4, 5.0)]
    to_beta = gradient(2.0, lambda x: random.beta((8000,), 0.1, x, seed=seed()))
    seeds = random.SeedGenerator(seed())
    two = [ops.convert_to_numpy(random.uniform((9,), seed=seeds)) for _ in range(2)]
    assert random.dropout(ones, 0.0, seed=1) is ones and not ops.convert_to_numpy(random.dropout(ones, 1.0)).any()
equal = {name: np.asarray(ops.convert_to_numpy(values), np.float64) for name, values in equal.items()}
assert (two[0] != two[1]).all() and len(np.unique(equal["dropout"])) == 2
assert -1 <= equal["uniform"].min() < -0.999 and 2.999 < equal["uniform"].max() < 3
assert abs(equal["uniform"].mean() - 1) < 0.01 and abs(equal["uniform"].std() - 4 / 12**0.5) < 0.01
assert equal["bfloat16"].max() < 1 and equal["float16"].max() < 1
assert np.abs(np.bincount(equal["randint"].astype(int) + 3) / 100001 - 1 / 7).max() < 0.005
shares = np.stack([np.bincount(row.astype(int)) / 20000 for row in equal["categorical"]])
assert np.abs(shares - np.exp(logits)).max() < 0.02
assert abs((equal["dropout"] > 0).mean() - 0.7) < 0.005 and abs(equal["dropout"].mean() - 1) < 0.01
assert (equal["a mask for all rows"] == equal["a mask for all rows"][:, :1]).all()
assert (np.sort(equal["shuffle"], 1) == np.arange(3000).reshape(3, 1000)).all()
assert (equal["shuffle"] % 1000 == equal["shuffle"][:1]).all() and (equal["shuffle"][0] != np.arange(1000)).sum() > 900
assert abs(close["normal"].mean() - 1) < 0.01 and abs(close["normal"].std() - 2) < 0.01
assert abs((close["normal"] > 3).mean() - 0.15866) < 0.002
assert 4.99 < close["truncated"].max() <= 5 and abs(close["truncated"].std() - 2 * 0.8796) < 0.01
for name, mean, var in (
    ("gamma", [0.3, 7], [0.3, 7]),
    ("beta", [0.5, 0.0625], [0.25 / 1.4, 0.2 * 3 / 3.2**2 / 4.2]),
    ("binomial", [0.5, 0.1, 12000, 0, 7], [0.25, 0.099, 8400, 0, 0]),
):
    values, mean, var = close[name].astype(np.float64), np.array(mean), np.array(var)
    assert (np.abs(values.mean(1) - mean) <= 4 * np.sqrt(var / values.shape[1])).all(), name
    assert np.allclose(values.var(1), var, rtol=0.2), name
assert abs((close["gamma"][1] < 4).mean() - 0.110674) < 0.005  # as by the distribution function
assert abs((close["binomial"][1] == 0).mean() - 0.99**10) < 0.02
assert (close["binomial"] == np.round(close["binomial"])).all() and 0 <= close["beta"].min() <= close["beta"].max() <= 1
assert np.allclose(to_alpha, 1, atol=0.05) and abs(to_beta / (-0.1 / 2.1**2) - 1) < 0.1
np.savez(sys.argv[1], **close)
print(json.dumps({name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in equal.items()}))
"""


@pytest.mark.long
def test_what_layers_draw_in_a_step(tmp_path):
    found, close = [], []
    for backend in ("tensorflow", "jax"):
        env = environment(KERAS_BACKEND=backend)
        command = [sys.executable, "-c", IN_A_STEP, str(tmp_path / "close.npz")]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        with np.load(tmp_path / "close.npz") as arrays:
            close.append(dict(arrays))
    assert found[0] == found[1]
    for name, values in close[0].items():  # logarithms and cosines are rounded otherwise
        within, apart = {"gamma": (1e-5, 1e-4), "beta": (1e-5, 1e-4), "binomial": (1e-5, 1e-3)}.get(name, (1e-6, 0))
        assert (~np.isclose(values, close[1][name], rtol=within, atol=5 * within)).mean() <= apart, name


class MixUp(layers.Layer):
    """Each example with another of its replica."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        if not training:
            return x
        share = keras.random.beta((ops.shape(x)[0], 1, 1, 1), 0.2, 0.2, seed=self.seeds)
        return share * x + (1 - share) * keras.random.shuffle(x, seed=self.seeds)


class Cell(layers.Layer):
    """Drops out in each turn."""

    state_size = 4

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.2)

    def call(self, x, states, training=False):
        hidden = ops.tanh(self.dropout(x, training=training) + states[0])
        return hidden, [hidden]


def restless(input_shape, classes):
    """A model that draws in as many ways as layers have."""
    inputs = keras.Input(input_shape)
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomTranslation(0.1, 0.1)(x)
    x = layers.GaussianNoise(0.1)(layers.Rescaling(1 / 255)(MixUp()(x)))
    x = layers.ReLU()(layers.SpatialDropout2D(0.2)(layers.Conv2D(8, 3)(x)))
    x = layers.Reshape((-1, 8))(layers.GaussianDropout(0.1)(x))
    x = x + layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.LSTM(16, dropout=0.2, recurrent_dropout=0.1)(x)
    x = layers.RNN(Cell(), unroll=True)(layers.Reshape((4, 4))(x))
    return keras.Model(inputs, layers.Dense(classes)(layers.AlphaDropout(0.1)(layers.Dropout(0.3)(x))))


@pytest.mark.long
def test_masks_and_noise_don_t_show_in_the_curve(tmp_path):
    """From one seed, on either backend, on one device and two: the same numbers are drawn, so rounding is all."""
    flags = ("--model=tests.draws_test:restless", "--replicas=2", "--steps=40", "--log_every=1", "--global_batch=64")
    strategies = (
        ("--backend=tensorflow", "--strategy=one_device"),
        ("--backend=jax", "--strategy=device_mesh", "--devices=2"),
    )
    curves = []
    for strategy in strategies:
        trainer(*flags, *strategy, f"--run_dir={tmp_path / strategy[0]}")
        curves.append(curve(tmp_path / strategy[0]))
    assert deviation(*curves) < 1e-5


class Silent(keras.Model):
    """Its call() says of `training` only that the layers before the dropout are not in it."""

    def __init__(self, classes):
        super().__init__()
        self.before = keras.Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.BatchNormalization()])
        self.dropout, self.out = layers.Dropout(0.5), layers.Dense(classes)

    def call(self, x):
        return self.out(self.dropout(self.before(ops.cast(x, "float32"), training=False)))


class Spoken(Silent):
    def call(self, x, training=False):
        return self.out(self.dropout(self.before(ops.cast(x, "float32"), training=False), training=training))


def test_layers_train_where_call_does_not_tell_them(tmp_path):
    """As in model(x, training=True): Keras's stateless_call() would have no dropout, without a word."""
    flags, curves = ("--replicas=2", "--steps=20", "--log_every=1", "--evaluate_every=never"), []
    for backend, model in (("jax", "Spoken"), ("jax", "Silent"), ("tensorflow", "Silent")):
        run = tmp_path / f"{backend}-{model}"
        trainer(*flags, f"--backend={backend}", f"--model=tests.draws_test:{model}", f"--run_dir={run}")
        curves.append(curve(run))
    assert max(deviation(curves[0], each) for each in curves) < 1e-5
